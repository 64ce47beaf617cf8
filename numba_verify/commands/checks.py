"""The checks of `check`: each draws a problem, runs it, and raises Failure when a promise of the contract is broken.

CASES compare a result row by row with float64. PROPERTIES compare results with each other, or look at what a refused call leaves.
Every batch has NaN in all slots that no request owns, junk behind the page list, and spare rows after the last draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from . import accuracy
from .batches import FREE_PAGES, PADDING_ROWS, Batch, Layout, Values, draw, lay_out, random_tree, tree_masks
from .places import captured
from .runners import Call, Runner


class Failure(Exception):
    """A promise was broken; the text says how."""


class Size(NamedTuple):
    """How large the problems are: row layout, heads, most draft tokens of a request, longest ordinary and longest prefix."""

    heads: int
    latent_dim: int
    rope_dim: int
    nodes: int
    prefix: int
    long_prefix: int


class Context(NamedTuple):
    """What a check gets."""

    runner: Runner
    size: Size
    seed: int

    def takes(self, dtype: str) -> bool:
        """Whether the kernel runs this dtype; `runner` is here because it runs bfloat16."""
        size, runner = self.size, self.runner
        return bool(runner.module.can_run(kernel=runner.kernel, num_heads=size.heads, latent_dim=size.latent_dim, rope_dim=size.rope_dim,
                                          dtype=dtype, device=runner.place.ordinal))

    def rng(self) -> np.random.Generator:
        """The same draws for every runner."""
        return np.random.default_rng(self.seed)

    def draw(self, rng: np.random.Generator, dtype: str = "bfloat16", masks: list[np.ndarray] | None = None,
             prefix: Sequence[int] | None = None, logit_cap: float = 0.0) -> Values:
        """Numbers of a batch: by default three requests with random trees and prefixes."""
        size = self.size
        if masks is None:
            masks = tree_masks([random_tree(rng, int(rng.integers(1, size.nodes + 1))) for _ in range(3)])
        if prefix is None:
            prefix = [int(length) for length in rng.integers(1, size.prefix + 1, len(masks))]
        return draw(rng, masks, prefix, size.heads, size.latent_dim, size.rope_dim, dtype, logit_cap)


Check = Callable[[Context], None]


def require(condition: bool, fault: str) -> None:
    if not condition:
        raise Failure(fault)


def verify(call: Call, values: Values, slack: float = 1.0) -> None:
    """Run, and compare every row with float64."""
    out, lse = call()
    fault = accuracy.judge(accuracy.solve(values), out, lse, slack).fault
    require(not fault, fault)


def case(layout: Layout, dtype: str = "bfloat16", logit_cap: float = 0.0, masks: Callable | None = None,
         prefix: Callable | None = None) -> Check:
    """A check of one batch. `masks(rng, size)` and `prefix(size)` replace the random trees and lengths."""
    def check(context: Context) -> None:
        rng = context.rng()
        values = context.draw(rng, dtype, masks and masks(rng, context.size), prefix and prefix(context.size), logit_cap)
        verify(Call(context.runner, lay_out(rng, values, layout)), values)

    check.dtype = dtype
    return check


def chains_and_gaps(rng: np.random.Generator, size: Size) -> list[np.ndarray]:
    """Causal chains, with requests that have no draft token at both ends and in the middle."""
    return [np.tril(np.ones((n, n), bool)) for n in (0, size.nodes, 0, 0, 1, 0)]


def any_mask(rng: np.random.Generator, size: Size) -> list[np.ndarray]:
    """Masks that are no trees; the first row of each request sees no draft token, not even itself."""
    masks = [rng.random((n, n)) < 0.5 for n in (size.nodes, 2)]
    for mask in masks:
        mask[0] = False
    return masks


def one_token(rng: np.random.Generator, size: Size) -> list[np.ndarray]:
    return [np.ones((1, 1), bool), np.ones((1, 1), bool)]


CASES: dict[str, Check] = {
    "bfloat16, draft trees, scattered slots": case(Layout()),
    "float16, pages of 16, draft rows aside, parents on the device": case(Layout(16, aside=True, tree="parents"), "float16"),
    "float32, pages of 5, 64-bit indices, dense mask": case(Layout(5, tree="dense", index_dtype="int64"), "float32"),
    "requests with no draft token or no prefix": case(Layout(tree="causal"), masks=chains_and_gaps,
                                                      prefix=lambda size: [5, 0, 0, size.prefix, 0, 3]),
    "any mask as bits, rows that see nothing": case(Layout(tree="bits"), masks=any_mask, prefix=lambda size: [0, 3]),
    "flat full mask, logit_cap": case(Layout(64, tree="full_mask"), logit_cap=2.0),
    "one long request beside a short one": case(Layout(), masks=one_token, prefix=lambda size: [size.long_prefix, 2]),
}


def hidden_nan(context: Context) -> None:
    """A NaN draft row reaches those that see it, and nobody else."""
    rng = context.rng()
    values = context.draw(rng, masks=tree_masks([[-1, 0, 0, 1], [-1, 0]]))
    values.keys[0][-2] = np.nan  # draft token 2 of request 0, a leaf: hidden from tokens 0, 1 and 3
    for layout in (Layout(), Layout(aside=True, tree="bits")):
        verify(Call(context.runner, lay_out(rng, values, layout)), values)


def same_bits(context: Context) -> None:
    """The same call again, in the same plan and in a new one."""
    rng = context.rng()
    batch = lay_out(rng, context.draw(rng), Layout())
    call = Call(context.runner, batch)
    first, again, anew = call(), call(), Call(context.runner, batch)()
    for other in (again, anew):
        require(all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(first, other, strict=True)),
                "two equal calls gave different bits")


def batch_invariant(context: Context) -> None:
    """deterministic=True: the bits of a request depend on nothing but that request."""
    rng = context.rng()
    values = context.draw(rng, prefix=[context.size.long_prefix // 2, context.size.prefix, 3])
    whole = by_request(context, rng, values, range(3), Layout())
    for order, layout in (((2, 0, 1), Layout(16, aside=True, tree="bits")), ((0,), Layout(tree="parents", index_dtype="int64"))):
        for r, got in by_request(context, rng, values, order, layout).items():
            require(got == whole[r], f"request {r} has other bits in the batch {list(order)} than in the batch [0, 1, 2]")


def by_request(context: Context, rng: np.random.Generator, values: Values, order: Sequence[int], layout: Layout) -> dict[int, bytes]:
    """The bits of out and lse of each request of the batch `order`."""
    chosen = values.take(order)
    out, lse = Call(context.runner, lay_out(rng, chosen, layout), deterministic=True)()
    ends = np.cumsum(chosen.counts)
    return {r: out[end - n:end].tobytes() + lse[end - n:end].tobytes() for r, n, end in zip(order, chosen.counts, ends, strict=True)}


def halves_merge(context: Context) -> None:
    """Two halves of a prefix run apart and merged by lse equal one run."""
    rng = context.rng()
    values = context.draw(rng, "float32" if context.takes("float32") else "float16")  # the less is rounded, the more a wrong lse shows
    cut = values.prefix // 2
    first = values._replace(keys=[np.concatenate([keys[:c], keys[p:]]) for keys, c, p in zip(values.keys, cut, values.prefix, strict=True)],
                            masks=[np.zeros_like(mask) for mask in values.masks])
    second = values._replace(keys=[keys[c:] for keys, c in zip(values.keys, cut, strict=True)])
    parts = [Call(context.runner, lay_out(rng, part, Layout(aside=True, tree="bits")))() for part in (first, second)]
    (out_a, out_b), (lse_a, lse_b) = zip(*[(out.astype(np.float64), lse.astype(np.float64)) for out, lse in parts], strict=True)
    lse = np.logaddexp(lse_a, lse_b)
    out = out_a * np.exp(lse_a - lse)[..., None] + out_b * np.exp(lse_b - lse)[..., None]
    fault = accuracy.judge(accuracy.solve(values), out, lse, slack=2.0).fault
    require(not fault, f"merged: {fault}")


def two_steps(context: Context) -> tuple[Batch, Batch]:
    """Two batches with the same capacities and other lengths, pages and trees."""
    rng = context.rng()
    both = [context.draw(rng) for _ in range(2)]
    layout = Layout(tree="parents", rows=max(values.total_q for values in both) + PADDING_ROWS,
                    entries=max(sum(map(len, values.keys)) for values in both) + FREE_PAGES)
    return lay_out(rng, both[0], layout), lay_out(rng, both[1], layout)


def next_step(context: Context) -> None:
    """Plan.update: another step in the same plan."""
    first, second = two_steps(context)
    call = Call(context.runner, first)
    verify(call, first.values)
    call.load(second)
    call.update()
    verify(call, second.values)


def graph_replay(context: Context) -> None:
    """A captured update and run, replayed with other lengths, pages and trees."""
    first, second = two_steps(context)
    call = Call(context.runner, first)
    call()

    def enqueue(stream: int) -> None:
        call.update(stream)
        call.run(stream)

    with captured(context.runner.place.ordinal, enqueue) as replay:
        for batch in (second, first):
            call.load(batch)
            replay()
            fault = accuracy.judge(accuracy.solve(batch.values), *call.results()).fault
            require(not fault, fault)


graph_replay.gpu_only = True


def refusals(context: Context) -> None:
    """Bad input is refused by the contract's errors, and nothing is written."""
    rng = context.rng()
    values = context.draw(rng)
    batch = lay_out(rng, values, Layout())
    call = Call(context.runner, batch)
    good = call.arrays["q"]
    call.arrays["q"] = call.place.put(batch.q.astype(np.float32))
    expect(TypeError, "q: expected bfloat16", call.run)
    call.arrays["q"] = call.place.put(batch.q[:, :, :-1].copy())
    expect(ValueError, "q: expected shape", call.run)
    call.arrays["q"] = good
    call.scalars["sm_scale"] = float("nan")
    expect(ValueError, "sm_scale", call.run)
    require(call.untouched(), "a refused call has written to out or lse")
    expect(ValueError, "kernel: expected one of", lambda: Call(context.runner._replace(kernel="fast"), batch))


def validation(context: Context) -> None:
    """validate=True names the request, position and value of a page that is not there."""
    rng = context.rng()
    values = context.draw(rng)
    batch = lay_out(rng, values, Layout())
    batch.kv_indices[0] = 1_000_000
    call = Call(context.runner, batch, validate=True)
    expect(IndexError, "request 0 has 1000000 at position 0", call.run)
    require(call.untouched(), "a refused call has written to out or lse")


def expect(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    """Failure unless `call` raises `error` with `text` in it."""
    try:
        call()
    except Exception as raised:
        got = f"{type(raised).__name__}: {raised}"
        require(isinstance(raised, error) and text in str(raised), f"expected {error.__name__} with {text!r}, got {got}")
        return
    raise Failure(f"expected {error.__name__} with {text!r}, and the call went through")


PROPERTIES: dict[str, Check] = {
    "NaN in a hidden draft row": hidden_nan,
    "the same call gives the same bits": same_bits,
    "deterministic: bits depend on the request alone": batch_invariant,
    "two halves of a prefix merged by lse": halves_merge,
    "another step in the same plan": next_step,
    "CUDA graph replayed with other lengths": graph_replay,
    "bad input is refused and nothing written": refusals,
    "validate=True names a wrong page": validation,
}


def twins_agree(ours: Runner) -> Check:
    """The check that a kernel and its twin give the same rows, each within the rounding."""
    def check(context: Context) -> None:
        rng = context.rng()
        values = context.draw(rng)
        batch = lay_out(rng, values, Layout(16))
        (one, _), (other, _) = Call(ours, batch)(), Call(context.runner, batch)()
        found = accuracy.largest_difference(one[:values.total_q], other[:values.total_q])
        allowed = accuracy.FACTOR * accuracy.FLOOR["bfloat16"]
        require(found <= allowed, f"rows differ by {found:.2e} of their norm, allowed {allowed:.2e}")

    return check
