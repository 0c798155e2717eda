"""What experiments.compare_torch says where torch is missing, and its differences by hand."""

import sys

import numpy as np
import pytest

from acceptmoe_jax.comparison import differences
from acceptmoe_jax.comparison.passes import visible_rows
from acceptmoe_jax.comparison.torch_target import require_torch
from acceptmoe_jax.errors import UserError
from tests import pocket


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_is_not_installed_is_named_with_how_to_install_it(monkeypatch, missing):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    with pytest.raises(UserError, match=f"{missing} cannot .*tests/requirements-torch.txt"):
        require_torch()


def test_without_torch_the_program_says_so_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('as where there is none')")
    output = tmp_path / "output"
    done = pocket.run_program(
        "compare_torch",
        f"--target={pocket.TARGET}",
        f"--output_dir={output}",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the comparison needs torch and transformers")
    assert done.stderr.count("\n") == 1
    assert not output.exists()


def test_logit_differences_are_absolute_and_by_position():
    ours = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, 1.0]], np.float32)
    theirs = np.array([[1.5, 2.0, 3.0], [1.0, 0.0, 2.0]], np.float32)
    apart = differences.compare_logits(ours, theirs)
    assert apart.by_position.tolist() == [0.5, 3.0]
    assert apart.mean == 4.5 / 6
    assert apart.same_top.tolist() == [True, False]


def test_experts_are_the_same_in_any_order():
    ours, theirs = np.array([[3, 1], [2, 0]]), np.array([[1, 3], [2, 1]])
    assert differences.same_experts(ours, theirs).tolist() == [True, False]


def test_best_experts_stay_inside_the_set():
    logits = np.array([[0.1, 0.9, 0.9, 0.4], [0.3, 0.2, 0.1, 0.0]])
    assert differences.best_experts(logits, 2).tolist() == [[1, 2], [0, 1]]
    eligible = np.array([True, False, True, True])
    assert differences.best_experts(logits, 2, eligible).tolist() == [[2, 3], [0, 2]]


def test_a_divergence_is_the_first_token_that_differs():
    assert differences.first_divergence([5, 6, 7, 8], [5, 6, 9, 9]) == 2
    assert differences.first_divergence([5, 6], [5, 6]) is None


def test_a_margin_is_between_the_best_two():
    assert differences.top2_margin(np.array([0.25, 2.0, -1.0, 1.5])) == 0.5


def test_a_node_sees_the_prefix_its_ancestors_and_itself():
    """Two prompt tokens, then a root with children 1 and 2, and 3 below 2."""
    visible = visible_rows(2, np.array([-1, 0, 0, 2]))
    expected = ["100000", "110000", "111000", "111100", "111010", "111011"]
    assert ["".join(map(str, row)) for row in visible.astype(int)] == expected
