"""COL under the spmd execution model: what each id means where one process drives all devices and there are no ranks.

A rank's part becomes the rows that a device holds: ``Execution.place`` splits dimension 0 over all devices, and an
operation across that dimension makes the compiler move data, as a collective would. What is asserted is that nobody
can tell: the numbers are those of the whole tensor, however many rows each device holds, none included. Parameters
are split as the layout says, so gathering them and scattering their gradients is asked as training does it. That
values are right is all that the interface can show; that they travelled is for the backend's own tests.

``collectives.py`` names these bodies; data, oracle and bounds are those of the bodies there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from accelbridge.conformance.bench import Bench, NotSupported, TooSmall, is_unsupported
from accelbridge.conformance.oracle import collectives as oracle
from accelbridge.conformance.suite.spmd_support import Mesh, mesh
from accelbridge.conformance.suite.trainer_support import devices, on_host
from accelbridge.parallel.layout import Layout

_WHOLE = (torch.float32, torch.bfloat16, torch.int64)
_FEW = (1, 7, 1000)
_Move = Callable[[Tensor], Tensor]
_Made = dict[str, tuple[Tensor, Tensor]]


def _floats(t: Bench) -> list[torch.dtype]:
    """float32, and what else the backend says that it adds up."""
    more = (torch.bfloat16, torch.float16, torch.float64)
    return [torch.float32, *(d for d in more if t.supported("all_reduce", str(d).removeprefix("torch."), "sum"))]


def _taken(on: Mesh, x: Tensor, row: Tensor) -> Tensor:
    """``row`` in the place of every row of ``x``, on the device that holds it. What is taken is decided by data, so
    that no compiler leaves the rest away."""
    keep = on.split(torch.zeros(len(x), *[1] * (x.dim() - 1), dtype=torch.bool))
    return torch.where(keep, x, row)


def _is_row(on: Mesh, count: int, row: int) -> Tensor:
    return on.split((torch.arange(count) == row).unsqueeze(1))


# ------------------------------------------------------------------------------------------------ each operation


def sums_exact(t: Bench) -> None:
    """The sum of hashed integers over rows that all devices hold is exact, also as ``Execution.sum`` and ``read_sums``
    give it: for every dtype, and for numbers of rows that the devices do not divide."""
    with mesh(t) as on:
        for dtype in _WHOLE:
            made: _Made = {}
            for count in on.counts:
                for size in (*_FEW, *((2**20 + 3,) if count == on.size else ())):
                    rows = on.rows(count, size, dtype=dtype)
                    total = on.execution.sum(on.split(rows).sum(0))
                    made[f"{count} x {size} {dtype}"] = total, oracle.whole_sum(list(rows))
            on.equal(made)
        rows = on.rows(3 * on.size, 5, name="read")
        got = on.execution.read_sums(list(on.split(rows).sum(0).unbind()))
        t.same(got, oracle.whole_sum(list(rows)).tolist(), "read_sums", "EXACT")


def reduction_precision(t: Bench) -> None:
    """Sums of normal and of wide-ranged numbers stay within the bound of the declared reduction precision: over one
    row of each device and over five, whole, and cut up as gradients are.

    At least 3 devices, since 2 make one rounding only. float32, and dtypes of which the backend declares sums.
    """
    with mesh(t, at_least=3) as on:
        for dtype in _floats(t):
            name = str(dtype).removeprefix("torch.")
            wider = "float64" if dtype is torch.float64 else "float32"
            reduced = str(t.capabilities.facts.get(f"reduce.precision.{name}", wider))
            for kind in (t.normal, t.wide):
                for count in (on.size, 5 * on.size):
                    label = f"{name} {kind.__name__} {count}"
                    rows = kind(count, 1001, name=label, dtype=dtype)
                    parts = list(rows)
                    want, bound = oracle.exact_sum(parts), oracle.sum_bound(parts, reduced)
                    t.within(on.execution.sum(on.split(rows).sum(0)), want, bound, name=f"sum {label}")
                    if dtype is torch.float32:
                        cut = on.gradient(on.model(torch.ones(1001)), rows)
                        t.within(cut, want, bound, name=f"gradient {label}")


def mean_and_product(t: Bench) -> None:
    """The mean over rows is their sum over their number within 2 units in the last place; a product of powers of two
    is exact. Of each element two rows hold something, so that it does not matter whether one divides first."""
    with mesh(t, at_least=3) as on:
        n, size = on.size, 997
        for dtype in _floats(t):
            rows, holder = on.rows(n, size, dtype=dtype, name="mean", low=1), torch.arange(size) % n
            held = (torch.arange(n).unsqueeze(1) - holder) % n < 2
            rows = rows.where(held, 0)
            want = oracle.exact_sum(list(rows)) / n
            bound = 2.0 * oracle.units_in_last_place(want, dtype)
            t.within(on.split(rows).mean(0), want, bound, name=f"mean {dtype}")
            exponents = on.rows(n, size, dtype=torch.float64, name="product").div(4).trunc()
            powers = torch.exp2(exponents).where(exponents >= 0, -torch.exp2(exponents))
            got = on.split(powers.to(dtype)).prod(0)
            t.equal(got, powers.prod(0).to(dtype), name=f"product {dtype}")


def extremes_and_nan(t: Bench) -> None:
    """MIN and MAX over rows are exact; a NaN, or +inf and -inf, in the rows of any device make sum, mean and product
    NaN. Whether MIN and MAX give NaN too is the fact ``reduce.minmax_nan`` ("propagates", else "undefined")."""
    extremes: dict[str, _Move] = {"MIN": lambda x: x.amin(0), "MAX": lambda x: x.amax(0)}
    with mesh(t, at_least=3) as on:
        n, size = on.size, 999
        for dtype in _floats(t):
            clean = t.normal(n + 1, size, name=str(dtype), dtype=dtype)
            on.equal({f"{op} {dtype}": (pick(on.split(clean)), pick(clean)) for op, pick in extremes.items()})
            # NaN at every seventh element, in each row in turn; opposite infinities at the one after it.
            dirty, place = on.rows(n, size, dtype=dtype, low=1), torch.arange(size)
            for row in range(n):
                dirty[row, (place % 7 == 0) & (place // 7 % n == row)] = torch.nan
            dirty[0, place % 7 == 1], dirty[n - 1, place % 7 == 1] = -torch.inf, torch.inf
            x, exact = on.split(dirty), dirty.double()
            made = {"sum": (x.sum(0), exact.sum(0)), "mean": (x.mean(0), exact.mean(0))}
            for op, (got, want) in {**made, "product": (x.prod(0), exact.prod(0))}.items():
                bound = 8.0 * n * oracle.units_in_last_place(want.nan_to_num(0.0, 0.0, 0.0), dtype)
                t.within(got, want, bound, name=f"NaN {op} {dtype}")
            if t.capabilities.facts.get("reduce.minmax_nan") == "propagates":
                on.equal({f"NaN {op} {dtype}": (pick(x), pick(dirty)) for op, pick in extremes.items()})


def read_by_every_row(t: Bench) -> None:
    """What one device holds, every row reads: one row, whichever it is; a parameter that is left whole on each device
    (ZeRO 1); and a number from ``Execution.scalar``."""
    with mesh(t) as on:
        for dtype in _WHOLE:
            made: _Made = {}
            for count in (on.size, 1, 2 * on.size + 1):
                rows = on.rows(count, 30, dtype=dtype)
                x = on.split(rows)
                for root in range(count):
                    made[f"row {root} of {count} {dtype}"] = _taken(on, x, x[root]), rows[root].expand(count, 30)
            on.equal(made)
    with mesh(t, Layout(dp_shard=devices(t), zero=1)) as on:
        rows, weight = on.rows(2 * on.size + 1, 30, low=1), on.rows(5, 6, name="weight")
        x = on.split(rows)
        on.equal(
            {
                "a whole parameter": (on.model(weight)(x), rows * weight.reshape(-1)),
                "a number": (x * on.execution.scalar(3.0), rows * 3.0),
            }
        )


def into_every_row(t: Bench) -> None:
    """A sum, or the largest, of all rows goes into one of them, whichever device holds it: it is exact there, and the
    others keep what they have."""
    with mesh(t) as on:
        for size in _FEW:
            made: _Made = {}
            for count in (on.size, 2 * on.size + 1):
                rows = on.rows(count, size)
                x, total, largest = on.split(rows), oracle.whole_sum(list(rows)), rows.amax(0)
                for root in range(count):
                    here, name = (torch.arange(count) == root).unsqueeze(1), f"into {root} of {count} x {size}"
                    chosen = _is_row(on, count, root)
                    made[f"sum {name}"] = torch.where(chosen, x.sum(0), x), torch.where(here, total, rows)
                    written = x.clone()
                    written[root] = x.amax(0)
                    made[f"MAX {name}"] = written, torch.where(here, largest, rows)
            on.equal(made)


def read_in_order(t: Bench) -> None:
    """What is split over devices is read whole, in order and bit for bit: rows by the host, a parameter (ZeRO 3) by the
    rows of every device, and both parameters and what a checkpoint gets from ``Execution.state``."""
    with mesh(t) as on:
        for dtype in _WHOLE:
            made: _Made = {}
            for count in on.counts:
                for size in (0, *_FEW):
                    rows = on.rows(count, size, dtype=dtype)
                    made[f"rows {count} x {size} {dtype}"] = on.split(rows), rows
            on.equal(made)
        for shape in ((4 * on.size, 3), (on.size + 1, 3), (on.size - 1,), (2 * on.size - 1, 5)):
            weight = on.rows(*shape, name="weight")
            rows = on.rows(on.size + 1, weight.numel(), low=1)
            model = on.model(weight)
            on.equal({f"a parameter {shape}": (model(on.split(rows)), rows * weight.reshape(-1))})
            state = on.execution.state(model, torch.optim.SGD(model.parameters(), lr=1.0))
            t.equal(on_host(state)["model.weight"], weight, name=f"state {shape}", host=True)


def sums_split_again(t: Bench) -> None:
    """Of a sum over all rows each device gets its part, and the right one: of gradients under ZeRO 2 and 3, whether or
    not the devices divide the parameter, and of a sum that meets rows which are split."""
    for zero in (2, 3):
        with mesh(t, Layout(dp_shard=devices(t), zero=zero)) as on:
            for shape in ((4 * on.size, 3), (on.size + 1, 3), (on.size - 1,), (2 * on.size - 1, 5)):
                model = on.model(on.rows(*shape, name="weight"))
                rows = on.rows(2 * on.size + 1, on.rows(*shape).numel())
                got = on.gradient(model, rows)
                on.equal({f"gradient {shape}, ZeRO {zero}": (got, oracle.whole_sum(list(rows)).reshape(shape))})
    with mesh(t) as on:
        for dtype in _WHOLE:
            made: _Made = {}
            for count in on.counts:
                parts, rows = on.rows(on.size, count, 30, dtype=dtype), on.rows(count, 30, dtype=dtype, name="met")
                total = on.split(parts).sum(0)
                made[f"{count} {dtype}"] = total + on.split(rows), oracle.whole_sum([*parts, rows])
            on.equal(made)


def rows_exchanged(t: Bench) -> None:
    """Rows that change places between devices arrive right, and done twice they are where they were: rows against
    columns, reversed, and by permutations of numbers that do not divide."""
    with mesh(t) as on:
        for count in (on.size, 3 * on.size, 2 * on.size + 1):
            rows = on.rows(count, 2 * on.size + 3)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(t.seed + count))
            x, columns = on.split(rows), on.rows(2 * on.size + 3, count, name="columns")
            turned = x.t() + on.split(columns)  # rows of the sum lie where columns of x do
            permuted = x[order.to(x.device)]
            made = {
                "rows against columns": (turned, rows.t() + columns),
                "and back": ((turned - on.split(columns)).t() + x, 2 * rows),
                "reversed": (_taken(on, x, x.flip(0)), rows.flip(0)),
                "reversed twice": (_taken(on, x, x.flip(0)).flip(0) + x, 2 * rows),
                "permuted": (permuted, rows[order]),
                "permuted and back": (permuted[order.argsort().to(x.device)], rows),
            }
            on.equal({f"{name}, {count}": pair for name, pair in made.items()})


def placed_and_read(t: Bench) -> None:
    """Every device gets its part of what is placed, and the host all of it, in order, for shapes of one to three
    dimensions of which the first may divide or not; also of what was computed in between."""
    with mesh(t) as on:
        for dtype in (*_WHOLE, torch.int32, torch.bool):
            made: _Made = {}
            for count in on.counts:
                for shape in ((count,), (count, 7), (count, 3, 5)):
                    rows = on.rows(*shape, dtype=dtype)
                    x = on.split(rows)
                    made[f"placed {shape} {dtype}"] = x, rows
                    made[f"computed {shape} {dtype}"] = x == 1, rows == 1
            on.equal(made)


def neighbours(t: Bench) -> None:
    """Rows go to the next device, the one before, and several further, in a ring, also where devices hold unequal
    numbers of them; two neighbours swap; and what was sent on one by one comes in order."""
    with mesh(t) as on:
        for count in (on.size, 3 * on.size, 2 * on.size + 1):
            rows = on.rows(count, 100)
            made: _Made = {}
            x = on.split(rows)
            for step in (1, -1, 3, count // 2):
                made[f"by {step}"] = _taken(on, x, x.roll(step, 0)), rows.roll(step, 0)
            made["swapped"] = torch.cat([x[-1:], x[1:-1], x[:1]]), torch.cat([rows[-1:], rows[1:-1], rows[:1]])
            passed = x
            for _ in range(3):
                passed = _taken(on, x, passed.roll(1, 0))
            made["on and on"] = passed, rows.roll(3, 0)
            on.equal({f"{name} of {count}": pair for name, pair in made.items()})


def synchronize_waits_for_all(t: Bench) -> None:
    """``Device.synchronize`` returns only when every device has done what was queued on it: a transfer of rows of all
    of them, behind exchanges between them, has then reached the host, where it is read without waiting for it."""
    with mesh(t) as on:
        for turn in range(6):
            rows = on.rows(4 * on.size + turn % 2, 4096, name=f"turn {turn}")
            x = on.split(rows)
            for _ in range(4):
                x = x.roll(1, 0) + x.sum(0)
            want = rows
            for _ in range(4):
                want = want.roll(1, 0) + want.sum(0)
            out = torch.full(rows.shape, torch.nan)
            transfer = t.backend.offload.to_host(x, out=out)
            t.backend.device.synchronize()
            t.equal(out.clone(), want, code="ORDER", name="synchronised", host=True)
            transfer.wait()
            t.equal(x, want, code="ORDER", name="on the devices")


# ------------------------------------------------------------------------------------------------------- layouts


def halves_do_not_mix(t: Bench) -> None:
    """Sums within halves of the rows, and within every second row, do not mix; each row reads the sum of its own group,
    and whoever is in no group keeps its data. With two axes for data, and with one for data and one for tensor
    parallelism, as far as the backend has them; the whole sum is right there too."""
    count, axes = devices(t), t.capabilities.layout_axes
    if count < 4 or count % 2:
        raise TooSmall(f"an even number of at least 4 devices needed, {count} found")
    layouts = {
        "dp_replicate": Layout(dp_replicate=2, dp_shard=count // 2),
        "tp": Layout(dp_shard=count // 2, tp=2),
    }
    for layout in (layout for axis, layout in layouts.items() if axis in axes):
        with mesh(t, layout) as on:
            for size in _FEW:
                rows = on.rows(2 * count, size, name=layout.describe())
                got, want = _in_groups(on.split(rows), count), _in_groups(rows, count)
                on.equal({f"{name} {size}, {layout.describe()}": (got[name], want[name]) for name in want})


def _in_groups(x: Tensor, count: int) -> dict[str, Tensor]:
    """Sums of whole numbers within groups of the 2 x ``count`` rows of ``x``, which no order of adding changes."""
    halves, every_second = x.view(2, count, -1), x.view(count, 2, -1)
    first, rest = x[:count], x[count:]
    return {
        "whole": x.sum(0),
        "halves": halves.sum(1),
        "every second": every_second.sum(0),
        "halves, read": (halves + halves.sum(1, keepdim=True)).view_as(x),
        "every second, read": (every_second + every_second.sum(0)).view_as(x),
        "no member": torch.cat([first + first.sum(0), rest]),
    }


def one_way_is_identity(t: Bench) -> None:
    """Where data parallel is one way (all devices share one copy of the model, by tensor parallelism), it feeds one
    coordinate, ``Execution.sum`` and ``read_sums`` give back what they are handed, and every operation on rows, which
    each device then holds whole, is the host's."""
    if "tp" not in t.capabilities.layout_axes:
        raise NotSupported("layouts have no axis tp, so that data parallel is as many ways as there are devices")
    with mesh(t, Layout(tp=devices(t))) as on:
        t.same(tuple(on.execution.data_coordinates), (0,), "coordinates of the data", "RANKS")
        for dtype in (torch.float32, torch.bfloat16):
            rows = on.rows(6, 5, dtype=dtype)
            x = on.split(rows)
            made = {
                "sum": (on.execution.sum(x), rows),
                "over rows": (x.sum(0), oracle.whole_sum(list(rows))),
                "largest": (x.amax(0), rows.amax(0)),
                "a row": (_taken(on, x, x[1]), rows[1].expand(6, 5)),
                "turned": (x.roll(1, 0).t().contiguous(), rows.roll(1, 0).t().contiguous()),
            }
            on.equal({f"{name} {dtype}": pair for name, pair in made.items()})
        numbers = on.rows(5, name="read")
        t.same(on.execution.read_sums(list(on.split(numbers).unbind())), numbers.tolist(), "read_sums", "EXACT")


# ------------------------------------------------------------------------------------------- time, order, memory


def steps_queued(t: Bench) -> None:
    """1,000 steps that are queued without a wait each give the sum of their own rows, which what follows reads at once;
    what ``end_step`` handed out stays as it was. In some repeats the host comes late."""
    repeats, size, late = 1000, 256, (10, 300, 600, 999)
    with mesh(t) as on:
        rows, found = on.rows(repeats, on.size, size), []
        carried = on.split(torch.zeros(size))
        for i in range(repeats):
            if i in late:
                time.sleep(0.05)
            total = on.execution.sum((on.split(rows[i]) * 1.0).sum(0))
            kept = on.execution.end_step({"total": total + 0.0, "carried": carried + total})
            found.append(kept["total"])
            carried = kept["carried"]
        for i in range(0, repeats, 50):
            t.equal(torch.stack(found[i : i + 50]), rows[i : i + 50].sum(1), name="each")
        t.equal(carried, rows.sum((0, 1)), name="all, carried along")


_VIEWS: dict[str, _Move] = {
    "offset": lambda x: x[3:],
    "columns": lambda x: x[:, 4:8],
    "every second row": lambda x: x[::2],
    "transposed": lambda x: x.t(),
}


def views(t: Bench) -> None:
    """Transposed, sliced, strided and offset views of what is split are right by value, read and written: sums, a row
    that all read, rows that move on, and a sum that is added in place, which the rest of the memory does not feel."""
    with mesh(t) as on:
        for count in (2 * on.size, 2 * on.size + 3):
            rows = on.rows(count, 12)
            made: _Made = {}
            x = on.split(rows)
            for name, view in _VIEWS.items():
                part, want = view(x), view(rows)
                made[f"sum {name}"] = part.sum(0), oracle.whole_sum(list(want))
                made[f"row {name}"] = part[1] + part, want[1] + want
                made[f"moved {name}"] = part.roll(1, 0), want.roll(1, 0)
                written, expected = x.clone(), rows.clone()
                view(written).add_(view(written).sum(0))
                view(expected).add_(want.sum(0))
                made[f"written {name}"] = written, expected
            on.equal({f"{name} of {count}": pair for name, pair in made.items()})


def in_place(t: Bench) -> None:
    """What is written over by a reduction or an exchange of itself, whole or in part, has the bits of separate memory;
    and what was only read stays."""

    def subtracted(x: Tensor) -> None:
        x.sub_(x.sum(0))

    def some_rows(x: Tensor) -> None:
        x[1:-1] = x.sum(0)

    def moved(x: Tensor) -> None:
        x.copy_(x.roll(1, 0))

    def shifted(x: Tensor) -> None:
        x[:-1] += x[1:].clone()

    with mesh(t) as on:
        for count in (on.size, 2 * on.size + 1):
            rows = on.rows(count, 333)
            made: _Made = {}
            x = on.split(rows)
            for change in (subtracted, some_rows, moved, shifted):
                got, want = x.clone(), rows.clone()
                change(got)
                change(want)
                made[change.__name__] = got, want
            made["a sum"] = x.sum(0), oracle.whole_sum(list(rows))
            made["what was read"] = x, rows
            on.equal({f"{name} {count}": pair for name, pair in made.items()})


def subnormals(t: Bench) -> None:
    """Subnormal float32 summands are kept, or count as 0 where ``ftz.float32`` = "flushed" says so. Rows that change
    devices keep them likewise, and the sign of zero unless ``move.zero_sign`` = "lost": a compiler may send a row as a
    sum of it and of zeros."""
    facts = t.capabilities.facts
    flushed, lost = facts.get("ftz.float32") == "flushed", facts.get("move.zero_sign") == "lost"
    with mesh(t) as on:
        tiny = (on.rows(on.size, 500, dtype=torch.float64, low=1) * 2.0**-149).float()
        kept = tiny.double().sum(0).float()
        t.equal(on.split(tiny).sum(0), torch.zeros(500) if flushed else kept, name="subnormal")
        zeros = torch.zeros(on.size, 500)
        zeros[:, ::2] = -0.0
        for name, data in (("subnormal", tiny), ("zero", zeros)):
            x, order = on.split(data), torch.arange(on.size).flip(0)
            moved = {
                "row": (_taken(on, x, x[1]), data[1].expand_as(data)),
                "roll": (x.roll(1, 0), data.roll(1, 0)),
                "permuted": (x[order.to(x.device)], data[order]),
                "turned": (x.t().contiguous(), data.t().contiguous()),
            }
            for how, (got, want) in moved.items():
                if (name == "zero" and lost) or (name == "subnormal" and flushed):
                    t.within(got, want, 2.0**-126, name=f"{name} {how}")  # either is right
                else:
                    t.equal(got, want, name=f"{name} {how}")


def many_in_one_graph(t: Bench) -> None:
    """500 small reductions and moves of several kinds that are queued together are all right, in whatever order they
    are read."""
    with mesh(t) as on:
        rows = on.rows(500, on.size, 30)
        made: _Made = {}
        for i, part in enumerate(rows):
            x = on.split(part)
            if i % 3 == 0:
                made[f"sum {i}"] = x.sum(0), oracle.whole_sum(list(part))
            elif i % 3 == 1:
                root = i % on.size
                made[f"row {i}"] = x + x[root], part + part[root]
            else:
                made[f"moved {i}"] = x.roll(1, 0), part.roll(1, 0)
        on.equal(dict(reversed(made.items())))


# -------------------------------------------------------------------------------------------------------- dtypes


_MOVES: dict[str, _Move] = {
    "row": lambda x: x[1].expand_as(x).contiguous(),
    "roll": lambda x: x.roll(1, 0),
    "reversed": lambda x: x.flip(0),
}


def bytes_moved(t: Bench) -> None:
    """Bytes that change devices keep every bit pattern, and so 8-bit floats that travel as bytes, which is how they
    are sent where the backend does not claim to gather the format itself; where it does, its own moves keep every
    pattern too. A sum of them is right or refused by a typed error."""
    codes = torch.arange(256, dtype=torch.int64)
    with mesh(t) as on:
        raw = torch.stack([((codes * 3 + 85 * r) % 256).to(torch.uint8) for r in range(on.size + 1)])
        x = on.split(raw)
        on.equal({f"bytes {name}": (move(x), move(raw)) for name, move in _MOVES.items()})
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            name = str(dtype).removeprefix("torch.")
            sent = {how: (move(x).view(dtype).view(torch.uint8), move(raw)) for how, move in _MOVES.items()}
            on.equal({f"{name} as bytes, {how}": pair for how, pair in sent.items()})
            if t.supported("all_gather", name):
                t.covers("all_gather", name)
                as_floats = {how: (move(x.view(dtype)).view(torch.uint8), move(raw)) for how, move in _MOVES.items()}
                on.equal({f"{name} {how}": pair for how, pair in as_floats.items()})
            small = torch.ones(on.size, 8)
            small[:, ::2] = -1.0
            _right_or_refused(t, f"sum of {name}", False, lambda d=dtype, s=small: on.split(s.to(d)).sum(0).float(),
                              small.sum(0))  # fmt: skip


def every_dtype(t: Bench) -> None:
    """Rows of every dtype are summed, compared, read by every row and moved exactly, or refused by a typed error."""
    kinds = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
    with mesh(t) as on:
        for dtype in (*kinds, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            rows = on.rows(on.size + 1, 50, dtype=torch.int64, low=0, name=str(dtype)).to(dtype)
            # torch adds up whole numbers in int64
            total = rows.double().sum(0).to(dtype if dtype.is_floating_point else torch.int64)
            calls: dict[str, tuple[_Move, Tensor]] = {
                "MAX": (lambda x: x.amax(0), rows.double().amax(0).to(dtype)),
                "row": (lambda x: _taken(on, x, x[1]), rows[1].expand_as(rows)),
                "moved": (lambda x: x.roll(1, 0), rows.roll(1, 0)),
                "SUM": (lambda x: x.sum(0), total),
            }
            for name, (call, want) in calls.items():
                _right_or_refused(
                    t, f"{name} {dtype}", dtype in _WHOLE, lambda call=call, r=rows: call(on.split(r)), want
                )


def _right_or_refused(t: Bench, name: str, needed: bool, call: Callable[[], Tensor], want: Tensor) -> None:
    try:
        got = call()
        t.backend.execution.end_step()
    except Exception as error:
        good = not needed and (is_unsupported(error) or isinstance(error, (ValueError, TypeError)))
        line = (str(error).splitlines() or [""])[0]
        t.same(good, True, f"{name} refused: {type(error).__name__}: {line}", "ERROR")
        return
    t.equal(got, want, name=name)


def deterministic(t: Bench) -> None:
    """Where the backend declares itself deterministic: sums of the same rows, whole and cut up as gradients are, have
    the same bits in 50 steps."""
    t.needs(t.capabilities.deterministic, "determinism")
    with mesh(t) as on:
        rows, found = t.wide(on.size, 3000, name="rows"), []
        model = on.model(torch.ones(3000))
        for _ in range(50):
            model.zero_grad()
            cut = on.gradient(model, rows)
            found.append(on.execution.end_step({"whole": on.split(rows).sum(0), "cut": cut}))
        for name in ("whole", "cut"):
            first = found[0][name].cpu()
            t.equal(torch.stack([values[name] for values in found]), first.expand(50, -1), name=name)
