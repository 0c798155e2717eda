"""Seeded traces of used experts, as a layer's verifications might leave them."""


def random_trace(rng, experts, steps, most):
    """A tuple of ascending experts for each verification: 1 to `most`, a few of them popular."""
    popularity = 1 / (1 + rng.permutation(experts))
    return [
        tuple(
            sorted(
                rng.choice(
                    experts,
                    size=rng.integers(1, most + 1),
                    replace=False,
                    p=popularity / popularity.sum(),
                ).tolist()
            )
        )
        for _ in range(steps)
    ]
