"""Records into tests/data the numbers that transformers and torch give, for tests without torch.

    python -m tests.record_references [--data_dir=tests/data]

Needs torch and transformers; takes about ten seconds on a CPU. Writes the tiny checkpoints of
`reference_cases` and references/, with one safetensors file a case beside references.json, which
names the versions used. All these folders are replaced together after all of them are complete.
"""

import pathlib
import shutil
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers
from absl import app, flags

from acceptmoe_jax.files import write_json
from tests import torch_eagle3, torch_gpt_oss, torch_qwen3_moe, torch_reference
from tests.reference_cases import (
    GPT_OSS,
    HEAD,
    HEAD_CASES,
    HEAD_TARGET,
    PROMPT_LENGTHS,
    QWEN3_MOE,
    ROPE_CASE,
    SEED,
    block_name,
    prompt_name,
)

_DATA_DIR = flags.DEFINE_string("data_dir", "tests/data", "Folder that holds the references.")


_FAMILIES = {
    **{name: torch_qwen3_moe for name in QWEN3_MOE},
    **{name: torch_gpt_oss for name in GPT_OSS},
}


def save_checkpoints(directory: pathlib.Path, seed: int) -> None:
    """Saves the targets and the head under `directory`."""
    for name, family in _FAMILIES.items():
        family.save_checkpoint(name, directory / name, seed)
    target = transformers.Qwen3MoeConfig.from_pretrained(directory / HEAD_TARGET)
    torch_eagle3.save_head(directory / HEAD, target, seed)


def all_cases(directory: pathlib.Path, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Computes all of `reference_cases.CASES` on the checkpoints under `directory`, by name.

    Raises:
      UnfitSeedError: if the numbers would not tell right from wrong.
    """
    cases = {}
    references = {
        name: family.load_reference(directory / name) for name, family in _FAMILIES.items()
    }
    for name, reference in references.items():
        for length in PROMPT_LENGTHS:
            case = torch_reference.prompt_case(reference, length, seed)
            cases[prompt_name(name, length)] = case
        cases[block_name(name)] = torch_reference.block_case(reference, seed)
        if name in GPT_OSS:
            prompt, block = cases[prompt_name(name, max(PROMPT_LENGTHS))], cases[block_name(name)]
            torch_gpt_oss.refuse_lenient_cases(reference, prompt, block)
    for name, norm_before_residual in HEAD_CASES.items():
        head = torch_eagle3.load_head(directory / HEAD, norm_before_residual)
        cases[name] = torch_eagle3.head_case(head, references[HEAD_TARGET].model, seed)
    cases[ROPE_CASE] = torch_gpt_oss.rope_case()
    return cases


def record(directory: pathlib.Path) -> None:
    """Writes checkpoints, cases and versions under the empty folder `directory`."""
    save_checkpoints(directory, SEED)
    references = directory / "references"
    references.mkdir()
    for name, arrays in all_cases(directory, SEED).items():
        contiguous = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        safetensors.numpy.save_file(contiguous, references / f"{name}.safetensors")
    write_json(
        references / "references.json",
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "seed": SEED,
        },
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    torch.set_num_threads(1)  # for matrices this small, threads only wait for each other
    output_dir = pathlib.Path(_DATA_DIR.value)
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".recording-") as temporary:
        new, old = pathlib.Path(temporary, "new"), pathlib.Path(temporary, "old")
        new.mkdir()
        old.mkdir()
        record(new)
        for folder in sorted(new.iterdir()):
            destination = output_dir / folder.name
            if destination.exists():
                shutil.move(destination, old / folder.name)
            shutil.move(folder, destination)
            print(destination)


if __name__ == "__main__":
    app.run(main)
