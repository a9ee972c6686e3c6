"""What nothing orders on a GPU is found where it is planted, and both sides are named."""

from pathlib import Path

import pytest
from fake_gpu import FakeGPU
from in_order import SNIPPETS, of_hooks_made_aside
from in_order import said as said_of_what_is_in_order
from parity_runs import write_data
from stream_faults import FAULTS, found

# What is said of each: when, what was done on which stream, and what it was not behind.
SAYS = {
    "weights laid out on a stream of their own": (
        "copy_ on the stream of stream_faults._beside",
        "omni.rank.sharded_adamw._with_buffers",
        "on the default stream",
    ),
    "gradients scaled on a side stream": (
        "reduce (engine)",
        "reduce_scatter_tensor_coalesced_ on the stream of group llm dp_cp",
        "that mul_ on the stream of stream_faults.behind_current (reduce (engine)",
    ),
    "gradients added while they are reduced": (
        "reduce (engine)",
        "add_ on the default stream writes",
        "reduce_scatter_tensor_coalesced_ on the stream of group llm dp_cp",
        "for which nobody has waited) reads",
    ),
    "memory freed while a side stream reads it": (
        "forward (engine)",
        ", at stream_faults._freed:",
        "mul on the default stream may be given",
        "that were freed and sum on the stream of stream_faults.behind_current",
    ),
    "memory let go by a wait elsewhere": (
        "forward (engine)",
        ", at stream_faults._let_go_by_wait:",
        "mul on the default stream may be given",
        "that were freed and allreduce_ on the stream of group world",
    ),
    "memory of a side stream read elsewhere": (
        "forward (engine)",
        ", at stream_faults._flattened_aside:",
        "mul on the stream of stream_faults.behind_current may be given",
        "that were freed and sum on the default stream",
    ),
    "a lane that waits for itself": (
        "ship (engine)",
        "alltoall_base_ on the stream of group ship reads",
        "that index_select on the default stream (ship (engine), at ops.rows.gather_rows",
    ),
    "totals on a side stream": (
        "update (engine)",
        "sum on the default stream reads",
        "that allreduce_ on the stream of stream_faults.behind_current (totals (engine)",
    ),
    "numbers read before they have come": (
        "totals of the step before (engine)",
        "tolist on the host reads",
        "that copy_ on the default stream (totals (engine)",
    ),
    "pinned memory used again": (
        "assemble (assembler)",
        "zero_ on the host writes",
        "that _to_copy on the stream of omni.rank.build.build_rank",
    ),
    "reload before the offload is done": (
        "forward (engine)",
        ", at stream_faults._reloaded:",
        "_to_copy on the default stream reads",
        "that copy_ on the stream of stream_faults.behind_current",
    ),
    "input of a side stream that does not wait": (
        "forward (engine)",
        ", at stream_faults._given_aside:",
        "allreduce_ on the stream of group world",
        "that mul on the stream of stream_faults.behind_current",
    ),
    "inputs read before they have come": (
        "encode (engine)",
        "on the default stream reads",
        "on the stream of omni.rank.build.build_rank (assemble (assembler), at ops.rotary.rotary_table",
    ),
    "memory read before it is written": (
        "forward (engine)",
        ", at stream_faults._not_awaited:",
        "sum on the stream of stream_faults._not_awaited reads",
        "that mul on the default stream",
    ),
    "memory overwritten while a side stream reads it": (
        "forward (engine)",
        ", at stream_faults._overwritten:",
        "zero_ on the default stream writes",
        "that sum on the stream of stream_faults.behind_current",
    ),
    "weights used before they are gathered": (
        "forward (engine)",
        "embedding on the default stream reads",
        "that allgather_into_tensor_coalesced_ on the stream of group llm dp_cp (update (engine)",
    ),
    "second hop before the first": (
        "ship (engine)",
        "index_select on the stream of parallel.lane.Lane.__init__ reads",
        "that alltoall_base_ on the stream of group ship",
        "for which nobody has waited",
    ),
    "rows of an exchange not waited for": (
        "backward (autograd)",
        "index_select on the default stream reads",
        "that alltoall_base_ on the stream of group llm pool",
    ),
    "activations not waited for": (
        "backward (autograd)",
        "mm on the default stream reads",
        "that recv_ on the stream of group backward with its member 1 (recv_backward (engine)",
    ),
    "message changed while it is sent": (
        "send_forward (engine)",
        "zero_ on the default stream writes",
        "that send on the stream of group forward with its member 1",
    ),
    "matrices used before they are gathered": (
        "forward (engine)",
        "mm on the default stream reads",
        "that _allgather_base_ on the stream of group llm partition",
        "parallel.partitions.PartitionedPart._start",
    ),
    "memory of a layer's input let go before it is copied": (
        "on the default stream may be given",
        "that were freed and copy_ on the stream of omni.models.llm_stage.LLMStage.__init__ (forward",
        "at ops.on_host.copy",
    ),
    "what attention put out let go before it is copied": (
        "on the default stream may be given",
        "that were freed and copy_ on the stream of omni.models.llm_stage.LLMStage.__init__ (forward",
        "at ops.on_host.copy",
    ),
    "attention found before it is back": (
        "backward",
        "on the default stream reads",
        "that copy_ on the stream of omni.models.llm_stage.LLMStage.__init__ (backward",
    ),
    "a layer made anew before its input is back": (
        "backward",
        "on the default stream reads",
        "that copy_ on the stream of omni.models.llm_stage.LLMStage.__init__ (backward",
    ),
    "a layer's input copied before it is made": (
        "forward (engine)",
        "copy_ on the stream of omni.models.llm_stage.LLMStage.__init__ reads",
        "on the default stream (forward (engine)",
    ),
    "checkpoint written before it is copied": (
        "checkpoint (checkpoint)",
        "numpy on the host reads",
        "that copy_ on the default stream (checkpoint (engine), at infra.shard_file.pack",
    ),
    "checkpoint copied on a side stream": (
        "restore (engine)",
        "copy_ on the default stream writes",
        "infra.shard_file.pack",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("races")
    write_data(path)
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_race_is_found_and_both_sides_are_named(gpu: FakeGPU, folder: Path, name: str) -> None:
    said = gpu.run(found, name, folder)
    assert any(all(part in line for part in SAYS[name]) for line in said), said


def test_nothing_is_said_of_what_is_in_order(gpu: FakeGPU) -> None:
    assert gpu.run(said_of_what_is_in_order) == {one.__name__: [] for one in SNIPPETS}


def test_autograd_orders_what_it_runs_where_hooks_were_made(gpu: FakeGPU, folder: Path) -> None:
    assert gpu.run(of_hooks_made_aside, folder) == []
