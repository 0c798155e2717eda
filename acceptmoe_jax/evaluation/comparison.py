"""The numbers of a grid of models, tasks and methods, with intervals, and against Standard SD.

A pair is a model and a task. Requests are drawn again within their pair, so that what two methods
made of one prompt stays together; means over pairs give each pair the same weight, as published.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from acceptmoe_jax import bootstrap
from acceptmoe_jax.evaluation import intervals
from acceptmoe_jax.evaluation.samples import Sample, statistics_of
from acceptmoe_jax.runtime.statistics import DecodeStatistics, summarise

STANDARD_SD = "native"


class Pair(NamedTuple):
    """A model and a task, by name."""

    model: str
    task: str


# Samples by the ids of their problems.
Samples = Mapping[str, Sample]


def row(samples: Samples, native: Samples | None) -> dict[str, Any]:
    """What a method came to on a pair.

    Args:
      samples: of the method; not empty.
      native: those of Standard SD on the same problems; None if it was not run.

    Returns:
      The keys of `summarise`, `samples`, `correct`, `accuracy`, under "intervals" the ends of 95 %
      intervals (Wilson's for accuracy, else bootstrapped), means by layer and by depth, and with
      `native` paired differences: `accuracy_against_native`, and the ratios
      `speed_against_native` and `traffic_against_native`.

    Raises:
      ValueError: if `native` is of other problems.
    """
    statistics = [statistics_of(sample) for sample in samples.values()]
    numbers = _numbers(samples)
    right = [sample["correct"] for sample in samples.values()]
    accuracy = intervals.share(right, list(samples))
    tokens = sum(len(sample["token_ids"]) for sample in samples.values())
    ends = {name: bootstrap.interval([table]) for name, table in numbers.items()}
    against = {} if native is None else _against(numbers, _paired(samples, native))
    return (
        summarise(statistics, tokens)
        | {"samples": len(samples), "correct": sum(right), "accuracy": accuracy.value}
        | {name: bootstrap.mean_statistic([table], of) for name, (table, of) in against.items()}
        | _profiles(statistics)
        | {
            "intervals": ends
            | {"accuracy": accuracy[1:]}
            | {name: bootstrap.interval([table], of) for name, (table, of) in against.items()}
        }
    )


def mean_row(
    pairs: Mapping[Pair, Samples], native: Mapping[Pair, Samples] | None
) -> dict[str, Any]:
    """A method's means over pairs, with intervals as in `row` (accuracy's bootstrapped too).

    Args:
      pairs: the method's samples; not empty.
      native: those of Standard SD; None if it was not run.

    Returns:
      Also `worst_accuracy_against_native` and, as text, `worst_pair`, with `native`.
    """
    strata: dict[str, tuple[list[np.ndarray], bootstrap.Statistic]] = {}
    for pair, samples in pairs.items():
        numbers = _numbers(samples)
        tables = {name: (table, bootstrap.ratio) for name, table in numbers.items()}
        if native is not None:
            tables |= _against(numbers, _paired(samples, native[pair]))
        for name, (table, of) in tables.items():
            strata.setdefault(name, ([], of))[0].append(table)
    means = {
        "pairs": len(pairs),
        "samples": sum(map(len, pairs.values())),
        **{name: bootstrap.mean_statistic(*each) for name, each in strata.items()},
        "intervals": {name: bootstrap.interval(*each) for name, each in strata.items()},
    }
    if native is not None:
        tables, of = strata["accuracy_against_native"]
        differences = [bootstrap.mean_statistic([table], of) for table in tables]
        worst = int(np.argmin(differences))
        means["worst_accuracy_against_native"] = differences[worst]
        means["worst_pair"] = ", ".join(list(pairs)[worst])
    return means


def _numbers(samples: Samples) -> dict[str, np.ndarray]:
    """Of each quantity a table [N, 2]: a sample's part and whole, whose sums' ratio it is."""
    statistics = [statistics_of(sample) for sample in samples.values()]
    by_sample = [_parts(*each) for each in zip(samples.values(), statistics, strict=True)]
    if any(s.loads.table.waves or s.prefill_bytes for s in statistics):
        by_sample = [parts | _moved(parts, s) for parts, s in zip(by_sample, statistics)]
    return {
        name: np.array([parts[name] for parts in by_sample], np.float64)
        for name in by_sample[0]
        if any(parts[name][1] for parts in by_sample)
    }


def _parts(sample: Sample, s: DecodeStatistics) -> dict[str, tuple[float, float]]:
    decoded = len(sample["token_ids"]) - 1  # the first token is prefill's
    return {
        "accuracy": (sample["correct"], 1),
        "accepted_length": (sum(s.accepted_lengths), s.verifications),
        "tokens_per_second": (decoded, s.decode_seconds),
        "eligible": (s.eligible.mean(), s.verifications),
        "used": (s.used.mean(), s.verifications),
        "natural_union": (s.natural_union.mean(), s.verifications),
        "agreement_with_native": (s.agreeing_rows, s.audited_rows),
        "kl_on_accepted_rows": (s.kl_sum, s.audited_rows),
    }


def _moved(parts: Mapping[str, tuple[float, float]], s: DecodeStatistics) -> dict[str, Any]:
    decoded, seconds = parts["tokens_per_second"]
    table, traffic = s.loads.table, s.loads.traffic
    return {
        "h2d_bytes_per_token": (traffic.bytes, decoded),
        "hit_rate": (table.hits, table.hits + table.misses),
        "wait_share": (traffic.wait_seconds, seconds),
        "waves": (table.waves, s.verifications * s.num_layers),
    }


def _paired(samples: Samples, native: Samples) -> dict[str, np.ndarray]:
    """The numbers of Standard SD, in the order of a method's samples."""
    if samples.keys() != native.keys():
        raise ValueError("a method and Standard SD answered different problems")
    return _numbers({problem: native[problem] for problem in samples})


def _against(
    numbers: Mapping[str, np.ndarray], native: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, bootstrap.Statistic]]:
    """Paired comparisons: a sample's numbers under both, and the statistic of their sums."""
    difference = numbers["accuracy"] - native["accuracy"]
    difference[:, 1] = 1  # over samples
    compared = {"accuracy_against_native": (difference, bootstrap.ratio)}
    ratios = {"speed": "tokens_per_second", "traffic": "h2d_bytes_per_token"}
    for what, name in ratios.items():
        if name in numbers and name in native:
            both = np.concatenate([numbers[name], native[name]], axis=1)
            compared[f"{what}_against_native"] = (both, bootstrap.ratio_of_ratios)
    return compared


def _profiles(statistics: Sequence[DecodeStatistics]) -> dict[str, Any]:
    """Mean set sizes by layer, and the share of verifications that reach each depth."""
    verifications = sum(s.verifications for s in statistics)
    if not verifications:
        return {"by_layer": None, "phat_by_depth": None}
    sums = {
        name: sum(getattr(s, name) for s in statistics)
        for name in ("natural_union", "eligible", "used")
    }
    return {
        "by_layer": {name: (total / verifications).tolist() for name, total in sums.items()},
        "phat_by_depth": (sum(s.reach for s in statistics) / verifications).tolist(),
    }
