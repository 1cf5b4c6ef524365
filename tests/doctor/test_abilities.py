"""What the doctor says of described cards and of this CPU, against expectations written by hand from data sheets."""

from hf_ext.doctor.machine import describe_abilities, describe_precision
from hf_ext.hardware import describe_hardware, detect_hardware

# ability: (T4, compute capability 7.5; A100, 8.0; H100, 9.0)
EXPECTED = {
    "bf16": (False, True, True),
    "fp16": (True, True, True),
    "TF32": (False, True, True),
    "flash attention": (False, True, True),
}
PRECISIONS = ("fp16 with loss scaling: no native bf16", "native bf16", "native bf16")
CARDS = ("T4", "A100", "H100")


def says(hardware) -> dict[str, bool]:
    return {name: able for name, able, _ in describe_abilities(hardware)}


def test_abilities_of_a_card_are_those_of_its_data_sheet():
    for column, card in enumerate(CARDS):
        assert says(describe_hardware(card)) == {name: row[column] for name, row in EXPECTED.items()}
        assert describe_precision(describe_hardware(card)) == PRECISIONS[column]


def test_each_no_on_a_t4_names_the_capability_that_it_lacks():
    reasons = {name: why for name, able, why in describe_abilities(describe_hardware("T4")) if not able}
    assert reasons == {
        "bf16": "native from 8.0, T4 has compute capability 7.5; torch would emulate it",
        "TF32": "from 8.0, T4 has compute capability 7.5",
        "flash attention": "from 8.0, T4 has compute capability 7.5",
    }


def test_of_a_cpu_it_says_what_the_instructions_say():
    with_bf16, without = describe_hardware("cpu-avx512-bf16"), describe_hardware("cpu")
    assert describe_abilities(with_bf16) == [("bf16", True, "instructions of cpu-avx512-bf16")]
    assert describe_abilities(without) == [("bf16", False, "no AVX512-BF16 or AMX found")]
    assert describe_precision(without) == "float32: neither bf16 nor fp16 is native"
    here = detect_hardware("cpu")
    assert describe_abilities(here) == describe_abilities(describe_hardware(here.name))
