"""What is recorded, under which key and in which shape, and with what the tails of a padded batch are filled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fake_device import FakeDevice
from outrider import LLM, SamplingParams
from outrider.device import HOST, open_device
from outrider.device.graphs import Graphs, padded
from outrider.input_batch import BatchBuilder, Shape, make_batch
from outrider.request import Request, Row, Step
from outrider.runner import Runner
from outrider.types import Draft


class Counter:
    """Work that can be recorded: it adds one to a tensor in place, and gives another that is new each time."""

    def __init__(self) -> None:
        self.calls, self.state = 0, torch.zeros(2)

    def __call__(self) -> tuple[Tensor, list[Tensor]]:
        self.calls += 1
        self.state.add_(1)
        return self.state * 10, [self.state + 0.5]


def test_the_first_run_warms_up_the_second_is_recorded_the_others_replay() -> None:
    device, work = FakeDevice(), Counter()
    graphs = Graphs(device)
    seen = []
    for count in range(1, 6):
        found, (other,) = graphs.run("key", work)
        seen.append(found)
        assert found.tolist() == [10.0 * count] * 2 and other.tolist() == [count + 0.5] * 2
        assert (device.captures, device.replays) == (int(count > 1), max(count - 1, 0))
    assert work.calls == 5  # nothing runs while it is captured
    assert seen[0] is not seen[1]
    assert all(found is seen[1] for found in seen[2:])  # a record fills the same tensors each time


def test_each_key_has_a_record_of_its_own() -> None:
    device, one, other = FakeDevice(), Counter(), Counter()
    graphs = Graphs(device)
    for _ in range(3):
        graphs.run(("target", 4), one)
        graphs.run(("target", 8), other)
    assert (device.captures, one.calls, other.calls) == (2, 3, 3)


def test_a_record_keeps_what_it_was_captured_with() -> None:
    device, work, late = FakeDevice(), Counter(), Counter()
    graphs = Graphs(device)
    for _ in range(2):
        graphs.run("key", work)
    graphs.run("key", late)
    assert (work.calls, late.calls) == (3, 0)


def test_forgotten_records_are_made_anew() -> None:
    device, work = FakeDevice(), Counter()
    graphs = Graphs(device)
    for _ in range(3):
        graphs.run("key", work)
    graphs.forget()
    graphs.run("key", work)
    assert device.captures == 1  # warming up again
    graphs.run("key", work)
    assert device.captures == 2


def test_no_more_graphs_are_held_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.device.graphs.MAX_GRAPHS", 3)
    device, work = FakeDevice(), Counter()
    graphs = Graphs(device)
    for key in range(4):
        graphs.run(key, work)
        graphs.run(key, work)
    assert list(graphs.captured) == [3] and device.captures == 4
    graphs.run(0, work)  # what was known once needs no warming up
    assert list(graphs.captured) == [3, 0] and device.captures == 5


def test_nothing_is_captured_after_the_warm_up() -> None:
    device, work, late = FakeDevice(), Counter(), Counter()
    graphs = Graphs(device)
    graphs.capture("key", work)
    graphs.capture("key", work)
    assert (device.captures, device.replays, work.calls) == (1, 0, 1)
    graphs.freeze()
    for _ in range(3):
        graphs.run("key", work)
        graphs.run("other", late)
    assert (device.captures, device.replays, late.calls) == (1, 3, 3)
    assert (graphs.late_captures, graphs.late_eager_runs) == (0, 3)
    assert graphs.is_usable("key") and not graphs.is_usable("other")
    graphs.capture("other", late)
    assert graphs.late_captures == 1


def test_of_similar_work_only_the_first_runs_before_its_capture() -> None:
    device, works = FakeDevice(), [Counter() for _ in range(4)]
    graphs = Graphs(device)
    for key, work in enumerate(works[:3]):
        graphs.capture(key, work, "similar")
    graphs.capture(3, works[3], "another")
    assert [work.calls for work in works] == [1, 0, 0, 1] and device.captures == 4
    others = [Counter(), Counter()]  # similar to none
    for key, work in enumerate(others, 4):
        graphs.capture(key, work)
    assert [work.calls for work in others] == [1, 1]
    graphs.freeze()
    assert [graphs.run(key, work)[0].tolist() for key, work in enumerate(works)] == [
        [20.0] * 2,
        *[[10.0] * 2] * 2,
        [20.0] * 2,
    ]
    assert device.replays == 4


def test_work_runs_first_if_a_driver_loads_no_kernel_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device, works, capture = FakeDevice(), [Counter() for _ in range(4)], FakeDevice.capture
    graphs = Graphs(device)

    def load(self: FakeDevice, run: Counter) -> object:
        if not run.calls:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, run)

    monkeypatch.setattr(FakeDevice, "capture", load)
    for key, work in enumerate(works):
        graphs.capture(key, work, "similar")
    assert [work.calls for work in works] == [1] * 4 and len(graphs.captured) == 4

    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        graphs.capture("other", fails, "similar")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_capture_that_the_driver_ends_is_repeated() -> None:
    device, state, calls = open_device("cuda"), torch.zeros(2, device="cuda"), []
    graphs = Graphs(device)

    def work() -> Tensor:
        calls.append(len(calls))
        if len(calls) == 1:
            torch.cuda.synchronize()  # is not permitted
        state.add_(1)
        return state * 10

    graphs.capture("first", lambda: state * 2, "similar")
    graphs.capture("second", work, "similar")
    graphs.capture("third", lambda: state + 1, "similar")
    assert len(calls) == 3  # in a capture, alone, in another capture
    for count in (2, 3):
        assert graphs.run("second", work).tolist() == [10.0 * count] * 2
        assert graphs.run("first", work).tolist() == [2.0 * count] * 2
        assert graphs.run("third", work).tolist() == [1.0 + count] * 2


def test_work_that_fails_does_so_each_time_and_harms_no_other() -> None:
    device = FakeDevice()
    graphs = Graphs(device)

    def fails() -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            graphs.run("key", fails)
        assert not device.replaying
    assert graphs.run("other", Counter()) is not None


@pytest.mark.parametrize(
    ("mode", "decoding", "mixed"), [("NONE", False, False), ("FULL_DECODE_ONLY", True, False), ("FULL", True, True)]
)
def test_what_is_recorded_is_the_users_choice(mode: str, decoding: bool, mixed: bool) -> None:
    graphs = Graphs(FakeDevice(), mode)
    assert (graphs.decoding, graphs.mixed) == (decoding, mixed)
    graphs = Graphs(HOST, mode)  # a device that cannot
    assert (graphs.decoding, graphs.mixed) == (False, False)


def test_padded_sizes_hold_what_they_must_and_are_few() -> None:
    assert [padded(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 65, 100, 257, 1000, 1025)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 32, 48, 96, 128, 384, 1024, 1280)
    ]
    for count in range(1, 3000):
        size = padded(count)
        assert count <= size == padded(size) and (count < 3 or size < 2 * count)
    assert len({padded(count) for count in range(1, 1025)}) < 30


def test_the_fake_device_refuses_what_a_replay_would_not_see() -> None:
    device = FakeDevice()
    buffer = device.buffer(1, torch.int32)
    device.capture(lambda: None)()  # a record may give nothing
    for run in (
        lambda: device.upload([1], torch.int32),
        lambda: buffer.fill([1]),
        lambda: device.capture(lambda: None)(),
    ):
        with pytest.raises(AssertionError, match="record"):
            device.capture(run)()
    number = device.capture(lambda: 7)
    number()
    with pytest.raises(AssertionError, match="int"):
        number()


# ---- batches ----


def test_every_tail_is_filled_as_its_readers_need_it() -> None:
    shape = Shape(4, 4, 3, is_tree=True, has_adapters=True)
    builder = BatchBuilder()
    builder.add([7, 8], [4, 5], [20, 21], [1, 5], [-1, 0], [2, 2])
    builder.add([9], [0], [3], [0], [-1], [-1])
    listed = builder.pack(shape)
    inputs, batch = make_batch(FakeDevice(), shape)
    inputs.fill(listed)
    assert batch.tokens.tolist() == [7, 8, 9, 0]
    assert batch.positions.tolist() == [4, 5, 0, 0]
    assert batch.slots.tolist() == [20, 21, 3, -1]  # nowhere
    assert batch.query_starts.tolist() == [0, 2, 3, 3, 3]  # rows without tokens
    assert batch.page_tables.tolist() == [[1, 5, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.parents is not None and batch.parents.tolist() == [-1, 0, -1, -1]
    assert batch.adapters is not None and batch.adapters.tolist() == [2, 2, -1, -1]
    assert len(listed) == inputs.tensor.shape[0]  # one upload fills all of it


@pytest.mark.parametrize("shape", [Shape(2, 2, 3, True), Shape(5, 3, 2, False, True), Shape(4, 3, 2, True, True)])
def test_aligned_tensors_hold_the_same_batch(shape: Shape) -> None:
    builder = BatchBuilder()
    builder.add([7], [4], [20], [1, 5], [-1], [2])
    builder.add([9], [0], [3], [0], [-1], [-1])
    batches = []
    for alignment in (1, 4):
        inputs, batch = make_batch(FakeDevice(), shape, alignment)
        inputs.fill(builder.pack(shape, alignment))
        batches.append([part.tolist() for part in vars(batch).values() if isinstance(part, Tensor)])
        parts = [batch.tokens, batch.positions, batch.slots, batch.query_starts, batch.page_tables]
        assert all((part.data_ptr() - inputs.tensor.data_ptr()) % (4 * alignment) == 0 for part in parts)
    assert batches[0] == batches[1]


def test_a_batch_that_fits_is_not_padded() -> None:
    builder = BatchBuilder()
    builder.add([7, 8], [0, 1], [0, 1], [0])
    listed = builder.pack(Shape(2, 1, 1)).tolist()
    assert listed == [7, 8, 0, 1, 0, 1, 0, 2, 0]


@pytest.mark.parametrize(("rows", "prefix"), [(1, 4), (2, 0)])
def test_the_host_knows_the_prefix_of_a_single_row(rows: int, prefix: int) -> None:
    builder = BatchBuilder()
    for _ in range(rows):
        builder.add([7, 8], [4, 5], [20, 21], [1, 5])
    assert builder.upload(FakeDevice())[0].prefix == prefix


def row(name: str, start: int, tokens: list[int], draft: Draft | None = None, pages: int = 1) -> Row:
    request = Request(name, tokens, SamplingParams(), 0, pages=list(range(pages)))
    return Row(request, start, tokens, sample=True, draft=draft)


@pytest.fixture
def make_runner(tiny_folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.engine.open_device", lambda backend: FakeDevice())

    def make(mode: str) -> Runner:
        return LLM(str(tiny_folder()), backend="reference", cudagraph_mode=mode, decode_steps=1).engine.runner

    return make


DECODES = [row(name, 5, [3]) for name in "abc"]
PROMPT = [row("a", 5, [3], pages=2), row("b", 0, [4, 5, 6, 7])]


@pytest.mark.parametrize(
    ("mode", "rows", "recorded"),
    [
        ("NONE", DECODES, None),
        ("NONE", PROMPT, None),
        ("FULL_DECODE_ONLY", DECODES, (4, 4, 32, False)),
        ("FULL_DECODE_ONLY", PROMPT, None),
        ("FULL", DECODES, (4, 4, 32, False)),
        ("FULL", PROMPT, (16, 4, 32, False)),
        ("FULL", [row("a", 5, [3], Draft([1, 2], [-1, -1])), row("b", 5, [3], pages=33)], (4, 4, 8192, True)),
    ],
)
def test_gather_pads_what_is_to_be_recorded(make_runner, mode: str, rows: list[Row], recorded) -> None:
    runner = make_runner(mode)
    for _ in range(2):  # the second run is captured
        runner.step(Step(rows))
    assert runner.graphs.captured == ([] if recorded is None else [("forward", Shape(*recorded))])
    batch = runner.gather(rows)
    tokens, count = sum(each.size for each in rows), len(rows)
    width = max(len(each.request.pages) for each in rows)
    branching = any(each.draft is not None for each in rows)
    shape = Shape(*recorded) if recorded else Shape(tokens, count, width, branching)
    optional = (given is not None for given in (batch.parents, batch.adapters, batch.states))
    assert (batch.tokens.shape[0], *batch.page_tables.shape, *optional) == shape
    assert batch.query_starts.shape[0] == shape[1] + 1
    assert batch.query_starts[count:].tolist() == [tokens] * (shape[1] + 1 - count)
    assert batch.slots[tokens:].tolist() == [-1] * (shape[0] - tokens)


def test_batches_of_one_shape_lie_in_the_same_memory_and_hold_nothing_old(make_runner) -> None:
    runner = make_runner("FULL")
    first = runner.gather([row(name, 9, [90]) for name in "abcd"])
    where = first.tokens.data_ptr()
    second = runner.gather(DECODES)
    assert second.tokens.data_ptr() == where
    assert second.tokens.tolist() == [3, 3, 3, 0] and second.positions.tolist() == [5, 5, 5, 0]
    assert second.slots.tolist() == [5, 5, 5, -1] and second.query_starts.tolist() == [0, 1, 2, 3, 3]


def test_records_are_forgotten_with_the_batches_that_they_read(make_runner, monkeypatch) -> None:
    monkeypatch.setattr("outrider.runner.MAX_SHAPES", 2)
    runner = make_runner("FULL")
    for _ in range(2):
        runner.step(Step(DECODES[:1]))
    runner.gather(DECODES[:2])
    assert len(runner.batches) == 2 and len(runner.graphs.captured) == 1
    runner.gather(PROMPT)
    assert len(runner.batches) == 1 and not runner.graphs.captured


def test_graphs_are_dropped_with_the_decode_state_that_they_read(make_runner, monkeypatch) -> None:
    monkeypatch.setattr("outrider.multi_step.loop.MAX_BUFFERS", 2)
    runner = make_runner("FULL")
    rounds = runner.multi_step
    for _ in range(2):
        runner.graphs.run("key", Counter())
    states = [rounds.buffers_for("", DECODES[:count], 0)[1].state for count in (1, 2)]
    assert [each.rows for each in states] == [1, 2] and runner.graphs.captured
    assert rounds.buffers_for("", DECODES, 0)[1].state.rows == 4
    assert list(rounds.buffers) == [("", 4, 0, 32, True, False)] and not runner.graphs.captured
