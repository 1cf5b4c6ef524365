"""The gradient of an effective batch does not depend on how it is split; stock Trainer's does."""

import logging

import pytest
import torch
import transformers
from closeness import distance
from datasets import Dataset
from stock_twins import SIZES
from token_rows import pad_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.models import exact_loss, find_loss_kind
from hf_ext.models.losses import LOSS_KINDS
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytestmark = pytest.mark.internals
NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "classifier_dropout")
SMALL = {**SIZES, **dict.fromkeys(NO_DROPOUT, 0.0)}
MORE = {
    "Esm": {"mask_token_id": 23, "position_embedding_type": "rotary"},
    "Albert": {"embedding_size": 16, "classifier_dropout_prob": 0.0},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    | {"decoder_start_token_id": 1, "eos_token_id": 2},
}


def make_model(name: str, **settings) -> torch.nn.Module:
    """A tiny transformers model from its class name."""
    torch.manual_seed(0)
    family = name.rsplit("For", 1)[0]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **MORE.get(family, {}), "num_labels": 3, **settings})
    return getattr(transformers, name)(config)


def make_rows(kind: str) -> list[dict]:
    """16 rows of 4 to 34 tokens; token labels are about 15 % to 80 % of a row."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(16):
        size = 4 + 2 * i
        ids = torch.randint(4, 23, (size,), generator=generator)
        ids[-1] = 2  # T5's end of sequence
        labels = {
            "masked": ids.clone(),
            "token": ids % 3,
            "single": torch.tensor(i % 3),
            "regression": torch.tensor(-100.0 if i == 5 else i / 4),
            "multi": torch.tensor([i % 2, i % 3 == 0, 1]).float(),
        }[kind]
        if kind in ("masked", "token"):
            hidden = torch.rand(size, generator=generator) > 0.8 - 0.04 * i
            hidden[0] = False
            labels[hidden] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


class Gradients(TrainerCallback):
    """Collects the gradient of the first optimizer step as one vector."""

    vector: torch.Tensor

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.vector = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train_step(trainer_cls, args_cls, model, rows, folder, split, collator=pad_rows, **given):
    """Gradient and logged loss of one optimizer step on all 16 rows, as batches x accumulation."""
    callback = Gradients()
    args = args_cls(
        output_dir=str(folder),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        max_steps=1,
        logging_steps=1,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    trainer = trainer_cls(model, args, collator, dataset, callbacks=[callback], **given)
    trainer.train()
    return callback.vector, trainer.state.log_history[0]["loss"]


FAST, STOCK = (FastTrainer, FastTrainingArguments), (Trainer, TrainingArguments)
CASES = {
    "masked": ("EsmForMaskedLM", {}),
    "token": ("EsmForTokenClassification", {}),
    "single": ("EsmForSequenceClassification", {}),
    "multi": ("EsmForSequenceClassification", {"problem_type": "multi_label_classification"}),
    "regression": ("EsmForSequenceClassification", {"num_labels": 1}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", CASES)
def test_esm_has_one_gradient_and_one_loss_however_the_batch_is_split(kind, tmp_path):
    name, settings = CASES[kind]
    rows = make_rows(kind)

    def step(trainer, split):
        return train_step(*trainer, make_model(name, **settings), rows, tmp_path, split)

    whole, loss = step(FAST, (16, 1))
    stock, stock_loss = step(STOCK, (16, 1))
    assert distance(whole, stock) < 1e-6  # in one piece there is nothing to mend
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    for split in ((4, 4), (2, 8), (7, 3)):  # the last of 7, 7 and 2 rows
        gradient, split_loss = step(FAST, split)
        assert distance(gradient, whole) < 1e-5
        assert split_loss == pytest.approx(loss, rel=1e-5)
    # Micro-batches have unequal numbers of labels, or of rows.
    uneven, least = ((4, 4), 0.05) if kind in ("masked", "token") else ((7, 3), 0.02)
    assert distance(step(STOCK, uneven)[0], stock) > least or kind == "multi"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForTokenClassification", "T5ForConditionalGeneration"])
def test_models_that_swallow_the_number_of_items_get_gradients_of_the_right_length(name, tmp_path):
    rows = make_rows("token" if "Token" in name else "masked")

    def step(trainer, split):
        return train_step(*trainer, make_model(name), rows, tmp_path, split)[0]

    whole = step(FAST, (16, 1))
    assert distance(whole, step(STOCK, (16, 1))) < 1e-6
    assert distance(step(FAST, (4, 4)), whole) < 1e-5
    # When this fails, transformers divides: take the class out of LOSS_KINDS.
    assert step(STOCK, (4, 4)).norm() > 3 * whole.norm()


def test_an_affinity_model_has_one_gradient_and_a_label_of_minus_100_counts(make_affinity, demo_rows, tmp_path):
    rows = demo_rows.select(range(16)).map(lambda row, i: {"label": -100.0 if i == 3 else row["label"]}, with_indices=1)

    def step(trainer, split):
        model, collator = make_affinity("lora", "full")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.fit_scaling(0.0, 30.0, {name: torch.randn(20, size) for name, size in model.embedding_sizes.items()})
        model.head.fit_scaling(torch.zeros(192), torch.ones(192))
        expected = model.eval()(**collator(list(rows))).loss.item()
        return *train_step(*trainer, model, rows, tmp_path, split, collator), expected

    whole, loss, expected = step(FAST, (16, 1))
    assert loss == pytest.approx(expected, rel=1e-5)
    for split in ((4, 4), (2, 8)):
        gradient, split_loss, _ = step(FAST, split)
        assert distance(gradient, whole) < 1e-5
        assert split_loss == pytest.approx(expected, rel=1e-5)
    _, stock_loss, _ = step(STOCK, (4, 4))
    assert stock_loss == pytest.approx(expected * 16 / 15, rel=1e-5)  # Trainer does not count that row


HEADS = {"ForMaskedLM": ["masked"], "ForConditionalGeneration": ["masked"], "ForTokenClassification": ["token"]}
HEADS["ForSequenceClassification"] = ["single", "multi", "regression"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in LOSS_KINDS for head in HEADS if head in n for k in HEADS[head]]
)
def test_the_exact_loss_of_one_batch_is_the_models_own(name, kind):
    settings = {"num_labels": 1} if kind == "regression" else {}
    model, batch = make_model(name, **settings).eval(), pad_rows(make_rows(kind))
    with torch.no_grad():
        own = model(**batch)
    expected_problem, model.config.problem_type = model.config.problem_type, None
    ours = exact_loss(find_loss_kind(model), model.config, own.logits, batch["labels"])
    assert ours.item() == pytest.approx(own.loss.item(), rel=1e-6)
    if "Sequence" in name:
        assert model.config.problem_type == expected_problem is not None


IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": 3}
OTHERS = {
    "GPT2": {"n_positions": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "attn_pdrop": 0.0},
    "GPT2LMHeadModel": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    "ConvNext": {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2},
    "ResNet": {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8},
    "Swin": {"patch_size": 2, "embed_dim": 8, "depths": [1], "num_attention_heads": [2], "window_size": 2},
}


def make_other(name: str, **given) -> torch.nn.Module:
    """A tiny causal language model or image classifier."""
    torch.manual_seed(0)
    family = name.rsplit("For", 1)[0].removesuffix("LMHeadModel")
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), 2) | {"num_key_value_heads": 2}
    settings = {**SMALL, **(IMAGE if "Image" in name else special), **OTHERS.get(family, {}), **OTHERS.get(name, {})}
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**{**settings, **given}))


COMPARED_HERE = [name for name, kind in LOSS_KINDS.items() if kind == "next_tokens" or "Image" in name]


@pytest.mark.parametrize("name", COMPARED_HERE)
def test_the_exact_loss_of_causal_models_and_of_images_is_their_own(name):
    model = make_other(name).eval()
    if "Image" in name:
        batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 1])}
    else:
        batch = pad_rows(make_rows("masked"))
    with torch.no_grad():
        own = model(**batch)
    ours = exact_loss(find_loss_kind(model), model.config, own.logits, batch["labels"])
    assert ours.item() == pytest.approx(own.loss.item(), rel=1e-6)


def test_every_covered_class_was_compared():
    heads = [name for name in LOSS_KINDS if any(head in name for head in HEADS)]
    assert len(LOSS_KINDS) == len(heads) + len(COMPARED_HERE) == 44
    assert all(hasattr(transformers, name) for name in LOSS_KINDS)


def test_gpt2_counts_what_it_predicts_however_a_step_is_split_and_stock_trainer_counts_first_tokens_too(tmp_path):
    rows = [{**row, "labels": row["input_ids"]} for row in make_rows("masked")]

    def step(trainer, split):
        return train_step(*trainer, make_other("GPT2LMHeadModel"), rows, tmp_path, split)

    (whole, loss), (split, split_loss) = step(FAST, (16, 1)), step(FAST, (4, 4))
    assert distance(split, whole) < 1e-5
    assert split_loss == pytest.approx(loss, rel=1e-5)
    num_tokens = sum(len(row["input_ids"]) for row in rows)  # 304
    stock, stock_loss = step(STOCK, (16, 1))
    # When this fails, transformers counts right: `_with_next_labels` can go.
    assert stock_loss == pytest.approx(loss * (num_tokens - 16) / num_tokens, rel=1e-5)
    assert distance(stock * num_tokens / (num_tokens - 16), whole) < 1e-5


class OwnLoss(transformers.EsmForMaskedLM):
    def forward(self, input_ids, attention_mask=None, labels=None):
        output = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        output.loss = 2 * output.loss
        return output


class OwnCompute(FastTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def make_trainer(model, folder, cls=FastTrainer, **given):
    chosen = {"compute_loss_func": given.pop("compute_loss_func", None)}
    args = FastTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False, **given
    )
    return cls(model, args, pad_rows, Dataset.from_list(make_rows("masked")), **chosen)


def test_a_loss_function_of_the_users_label_smoothing_and_a_forward_of_ones_own_are_left_alone(tmp_path, caplog):
    def mine(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean()

    model = make_model("EsmForMaskedLM")
    assert make_trainer(model, tmp_path, compute_loss_func=mine).compute_loss_func is mine
    smoothed = make_trainer(model, tmp_path, label_smoothing_factor=0.1)
    assert smoothed.compute_loss_func is None
    own = OwnLoss(model.config)
    with caplog.at_level(logging.WARNING):
        plain = make_trainer(own, tmp_path)
        assert plain.compute_loss_func is None
        alone = make_trainer(model, tmp_path, average_tokens_across_devices=False)
        assert not any(trainer.loss_counts_items() for trainer in (smoothed, plain, alone))  # batches keep their size
        assert "OwnLoss" not in caplog.text
        assert make_trainer(own, tmp_path, gradient_accumulation_steps=2).compute_loss_func is None
        make_trainer(model, tmp_path, cls=OwnCompute, gradient_accumulation_steps=2)
    assert "The loss of OwnLoss may be averaged over each micro-batch" in caplog.text
    assert "The loss of OwnCompute.compute_loss may be averaged over each micro-batch" in caplog.text
    assert find_loss_kind(type("Named", (transformers.EsmForMaskedLM,), {})(model.config)) == "tokens"
