"""What `accelerate launch` makes of a file of accelerate_configs, without launching anything."""

from argparse import Namespace
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from locations import ROOT

FOLDER = ROOT / "accelerate_configs"


def launcher_arguments(path: Path, *flags: str) -> tuple[Namespace, Namespace]:
    """What `accelerate launch --config_file path flags` starts with, and what it makes of that and the file."""
    before = launch_command_parser().parse_args(["--config_file", str(path), *flags, "script.py"])
    after, _, _ = _validate_launch_command(Namespace(**vars(before)))
    return before, after


def launcher_environment(path: Path, *flags: str) -> dict[str, str]:
    """The environment that `accelerate launch --config_file path flags` gives the script."""
    _, args = launcher_arguments(path, *flags)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]
