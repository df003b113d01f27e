"""Trials of the leak test on series whose answer is known: how often it cries wolf, what it finds.

Every series is noise of a known size, a shape that a sound program's memory can take, and a leak of so
many bytes a step, which may be zero. 1 MB is 2**20 bytes.
"""

from collections.abc import Callable, Mapping

import numpy as np

from grpo.memory.leaks.leak import MB, MIN_GROWTH_BYTES, Array, steady_growth, without_tokens

STEPS = 200
NOISES_MB = (5, 10, 20, 40, 80)
LEAK_MB = 0.25
POWER, WANDERING_POWER = 0.9, 0.6

Shape = Callable[[Array, Array, np.random.Generator], Array]
"""White noise (K, T) and a leak (T,), both in bytes, to what is tested (K, T)."""


def white_noise(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    return noise + leak


def autoregressive(noise: Array, leak: Array, rng: np.random.Generator, *, phi: float = 0.8) -> Array:
    """AR(1), as large in all as the noise given."""
    series = noise.copy()
    for step in range(1, noise.shape[1]):
        series[:, step] = phi * series[:, step - 1] + np.sqrt(1 - phi**2) * noise[:, step]
    return series + leak


def plateau(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    """Rises by 10 to 1,000 MB until 5 to 60 % of the run: in a line, ever more slowly, or at once."""
    num, steps = noise.shape
    part = np.arange(steps) / (steps * rng.uniform(0.05, 0.6, (num, 1)))  # 1 where the rise ends
    line = np.minimum(part, 1)
    saturating = (1 - np.exp(-3 * line)) / (1 - np.exp(-3))
    rise = np.choose(rng.integers(3, size=(num, 1)), [line, saturating, part >= 1])
    return noise + leak + rise * MB * 10 ** rng.uniform(1, 3, (num, 1))


def running_maximum(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    """A high-water mark, as of an allocator that gives nothing back."""
    return np.maximum.accumulate(noise + leak, axis=1)


def growing_completions(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    """Memory follows the tokens, which grow by 2 to 5 times, steadily, late or early; they are known."""
    num, steps = noise.shape
    progress = np.linspace(0, 1, steps) ** rng.uniform(0.5, 2, (num, 1))
    tokens = 1000 * (1 + progress * rng.uniform(1, 4, (num, 1))) * rng.normal(1, 0.1, noise.shape)
    bytes_per_token = MB * 10 ** rng.uniform(-2.5, -1, (num, 1))
    return without_tokens(noise + leak + bytes_per_token * tokens, tokens)


def late_jump(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    """One jump of 10 to 1,000 MB after 60 to 95 % of the run: an evaluation, a checkpoint."""
    num, steps = noise.shape
    after = np.arange(steps) >= steps * rng.uniform(0.6, 0.95, (num, 1))
    return noise + leak + after * MB * 10 ** rng.uniform(1, 3, (num, 1))


def plateau_of_ar1(noise: Array, leak: Array, rng: np.random.Generator) -> Array:
    return plateau(autoregressive(noise, leak, rng), np.zeros_like(leak), rng)


SHAPES: Mapping[str, Shape] = {
    "white noise": white_noise,
    "AR(1) 0.8": autoregressive,
    "plateau": plateau,
    "running maximum": running_maximum,
    "growing completions": growing_completions,
}
WANDERING = ("AR(1) 0.8", "running maximum")
"""Noise that stays where it is for many steps hides a small leak."""
HARDER: Mapping[str, Shape] = {"late jump": late_jump, "plateau in AR(1) 0.8": plateau_of_ar1}
"""Beyond what is promised, to know where the test ends."""


def share_found(shape: Shape, noise_mb: float, leak_mb: float, num_series: int, seed: int) -> float:
    """Share of series that are called a leak. One seed gives the same noise for every leak."""
    rng = np.random.default_rng([seed, int(noise_mb * 1000)])
    noise = rng.normal(0, noise_mb * MB, (num_series, STEPS))
    series = shape(noise, leak_mb * MB * np.arange(STEPS), rng)
    steady, gained = steady_growth(series, MIN_GROWTH_BYTES)
    return float((steady & (gained >= MIN_GROWTH_BYTES)).mean())


Shares = dict[str, list[float]]
"""Shares of series that are called a leak: by shape, one for each of NOISES_MB."""


def false_alarms(num_series: int, seed: int) -> Shares:
    """The share of sound series."""
    return _shares({**SHAPES, **HARDER}, 0.0, num_series, seed)


def power(num_series: int, seed: int) -> Shares:
    """The share of series with a leak of LEAK_MB a step."""
    return _shares(SHAPES, LEAK_MB, num_series, seed)


def _shares(shapes: Mapping[str, Shape], leak_mb: float, num_series: int, seed: int) -> Shares:
    return {
        name: [share_found(shape, noise, leak_mb, num_series, seed) for noise in NOISES_MB]
        for name, shape in shapes.items()
    }


def promises(alarms: Shares, found: Shares) -> dict[str, bool]:
    """The figures of docs/measurements.md, with some room for other seeds."""
    sound = max(float(np.mean(alarms[name])) for name in SHAPES)
    hard = max(float(np.mean(alarms[name])) for name in HARDER)
    least = {name: shares[0] for name, shares in found.items()}
    hidden = min(least.pop(name) for name in WANDERING)
    leak = f"{LEAK_MB} MB a step are found in {NOISES_MB[0]} MB of noise"
    return {
        f"of no shape are more than {sound:.1%} called a leak (at most 0.5 %)": sound <= 0.005,
        f"of no harder one more than {hard:.1%} (at most 1 %)": hard <= 0.01,
        f"{leak}: {min(least.values()):.0%} (90 %)": min(least.values()) >= POWER,
        f"{leak} that wanders: {hidden:.0%} (60 %)": hidden >= WANDERING_POWER,
    }
