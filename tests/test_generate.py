"""experiments.generate: what it writes, and how it refuses."""

import json
import pathlib
import shutil

import pytest
from absl import flags
from absl.testing import flagsaver

from acceptmoe_jax.errors import UserError
from experiments import generate
from tests import pocket

METHOD_KEYS = {
    "tokens",
    "seconds",
    "tokens_per_second",
    "accepted_length",
    "natural_union",
    "eligible",
    "used",
    "agreement_with_native",
    "kl_on_accepted_rows",
}
METHODS = ["autoregressive", "native", "acceptmoe", "moe_spec"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The files of one real run over two prompts."""
    folder = tmp_path_factory.mktemp("generate")
    prompts = folder / "prompts.jsonl"
    first, second = pocket.prompts(each=1)[:2]
    lines = [
        {"prompt_id": "text", "prompt": first},
        {"messages": [{"role": "user", "content": second}]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = pocket.run_program(
        "generate",
        f"--target={pocket.TARGET}",
        f"--draft={pocket.HEAD}",
        f"--selectors={','.join(METHODS)}",
        f"--prompts={prompts}",
        "--max_new_tokens=24",
        "--dtype=float32",
        f"--output_dir={folder / 'out'}",
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


def test_the_summary_holds_every_promised_number(output):
    summary = json.loads((output[0] / "summary.json").read_text())
    keys = {"methods", "device", "dtype", "target", "draft", "versions", "settings"}
    assert set(summary) == keys
    assert list(summary["methods"]) == METHODS
    for numbers in summary["methods"].values():
        assert METHOD_KEYS <= set(numbers)
        assert all(isinstance(numbers[key], (int, float)) for key in METHOD_KEYS)
    native, restricted = summary["methods"]["native"], summary["methods"]["acceptmoe"]
    assert native["agreement_with_native"] == 1
    assert restricted["used"] < native["used"]
    assert summary["methods"]["autoregressive"]["accepted_length"] == 1
    assert summary["methods"]["moe_spec"]["budget"] == round(restricted["eligible"])


def test_a_generation_a_line_for_every_prompt_and_method(output):
    lines = [
        json.loads(line) for line in (output[0] / "generations.jsonl").read_text().splitlines()
    ]
    assert [(line["method"], line["prompt_id"]) for line in lines] == [
        (method, prompt) for method in METHODS for prompt in ("text", "1")
    ]
    summary = json.loads((output[0] / "summary.json").read_text())
    for method, numbers in summary["methods"].items():
        mine = [line for line in lines if line["method"] == method]
        assert numbers["tokens"] == sum(len(line["token_ids"]) for line in mine)
    answers = {(line["method"], line["prompt_id"]): line["token_ids"] for line in lines}
    assert answers["native", "text"] == answers["autoregressive", "text"]
    assert {line["stop_reason"] for line in lines} <= {"stop_token", "length"}


def test_the_tables_say_what_is_measured_and_what_is_modelled(output):
    assert "measured on cpu" in output[1]
    assert "Modelled, not measured" in output[1]


def test_a_users_mistake_is_one_line_and_leaves_nothing(tmp_path):
    done = pocket.run_program(
        "generate",
        "--target=no/such/model", "--prompt=x", "--selectors=autoregressive",
        f"--output_dir={tmp_path / 'out'}", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "no/such/model" in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def settings(tmp_path):
    """Flags of a run that would work, for a test to spoil."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["generate", "--target=x", "--output_dir=x"])
    values = {
        "target": str(pocket.TARGET),
        "draft": str(pocket.HEAD),
        "prompt": "What is 2 + 3?",
        "prompts": None,
        "selectors": ["native"],
        "budget": None,
        "dtype": "float32",
        "output_dir": str(tmp_path / "out"),
    }
    with flagsaver.flagsaver(**values):
        yield tmp_path


def _refused(message, **changes):
    with flagsaver.flagsaver(**changes), pytest.raises(UserError, match=message):
        generate.main()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "either --prompt or --prompts"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"selectors": ["greedy"]}, "--selectors: 'greedy'"),
        ({"selectors": ["moe_spec"]}, "--budget"),
        ({"selectors": ["moe_spec"], "budget": 3}, "budget must be at least top_k = 8"),
        ({"selectors": ["moe_spec"], "budget": 500}, "500 exceeds the layer's 128"),
        ({"draft": None}, "--draft"),
        ({"draft_steps": 0}, "steps must be at least 1"),
        ({"draft_nodes": 4000}, "nodes = 4000"),
        ({"max_length": 4096}, "max_position_embeddings = 1024"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2000}, "max_length = 1024"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(settings, changes, message):
    _refused(message, **changes)
    assert not (settings / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("not json\n", "line 1: not valid JSON"),
        ('{"prompt": "x"}\n[1]\n', "line 2: not a JSON object"),
        ('{"question": "x"}\n', "line 1: neither a prompt"),
        ('{"prompt": ""}\n', "line 1: the prompt is empty"),
        ('{"prompt": "x", "prompt_id": "a"}\n{"prompt": "y", "prompt_id": "a"}\n', "line 2.*twice"),
    ],
)
def test_a_bad_prompts_file_is_refused_by_line(settings, text, message):
    path = settings / "prompts.jsonl"
    path.write_text(text)
    _refused(message, prompt=None, prompts=str(path))


def _damaged(folder, source, change):
    """A copy of a checkpoint with its config changed."""
    copy = pathlib.Path(shutil.copytree(source, folder / source.name))
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 127}, "experts.127"),
        ({"num_experts": 129}, "lacks .*experts.128"),
        ({"num_hidden_layers": 3}, "layers.3"),
        ({"hidden_size": 200}, "embed_tokens.weight"),
        ({"head_dim": "40"}, "head_dim should be of type int"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: the key factor is missing"),
        ({"model_type": "llama"}, "model_type"),
        ({"vocab_size": 1500}, "vocab_size = 1500"),
    ],
)
def test_a_wrong_target_config_is_refused_by_key(settings, change, message):
    target = _damaged(settings, pocket.TARGET, lambda config: config.update(change))
    _refused(message, target=target, draft=None, selectors=["autoregressive"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 1537}, "another target: vocab_size = 1537"),
        ({"target_hidden_size": 256}, "another target: target_hidden_size = 256"),
        ({"norm_output": True}, "norm_output = true"),
        ({"draft_vocab_size": 1000}, "d2t is int64.1024., expected integers .1000."),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "repeats"),
        ({"rope_theta": 5e4}, "another head config"),
    ],
)
def test_a_wrong_head_config_is_refused_by_key(settings, change, message):
    draft = _damaged(settings, pocket.HEAD, lambda config: config.update(change))
    _refused(message, draft=draft)


def test_a_truncated_checkpoint_is_refused_by_file(settings):
    target = pathlib.Path(_damaged(settings, pocket.TARGET, lambda config: None))
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    _refused("model.safetensors", target=str(target))
