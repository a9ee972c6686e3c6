"""Who trains under which layout when ranks come and go."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from ranks import RankPool
from small import overrides
from torch.distributed import TCPStore

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError, LLMLayoutConfig
from omni.planning.layouts import check_layout, resolve_layout
from omni.planning.prepare import prepare_run
from omni.training.seats import Seat, end_standing_by, find_seat, fitting, remember_slow, seated, stand_by
from parallel.layout import LayoutError

TP2, ALONE = LLMLayoutConfig(tp=2), LLMLayoutConfig()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("seats")
    return compose_config(overrides(path, path, "layout.llm.tp=2", "layout.llm.pp=2"))


def with_layouts(config: Config, *layouts: LLMLayoutConfig) -> Config:
    return replace(config, launch=replace(config.launch, layouts=list(layouts)))


@pytest.mark.parametrize(
    ("most", "tp", "pp", "world"),
    [(8, 2, 2, 8), (4, 2, 2, 4), (6, 2, 1, 6), (2, 2, 1, 2), (5, 1, 1, 5), (3, 1, 1, 3), (1, 1, 1, 1)],
)
def test_the_first_layout_that_takes_the_most_ranks_is_chosen(
    config: Config, most: int, tp: int, pp: int, world: int
) -> None:
    chosen, taken = fitting(with_layouts(config, TP2, ALONE), most)
    assert (chosen.layout.llm.tp, chosen.layout.llm.pp, taken) == (tp, pp, world)


def test_ranks_that_no_layout_takes_stand_by(config: Config) -> None:
    config = with_layouts(config, TP2)
    seats = [seated(config, number, range(7)) for number in range(7)]
    assert [seat.rank for seat in seats] == [0, 1, 2, 3, 4, 5, None]
    assert {seat.world for seat in seats} == {6}
    assert {seat.config.layout.llm.pp for seat in seats} == {1}


def test_who_is_left_out_stands_by_and_the_others_close_ranks(config: Config) -> None:
    config = with_layouts(config, TP2)
    seats = [seated(config, number, [0, 2, 3]) for number in range(4)]
    assert [seat.rank for seat in seats] == [0, None, 1, None]


def test_without_further_layouts_a_world_that_does_not_fit_is_refused(config: Config) -> None:
    assert fitting(config, 8) == (config, 8)
    with pytest.raises(LayoutError, match="a replica of 4 ranks does not divide the 6 ranks"):
        fitting(config, 6)
    with pytest.raises(LayoutError, match="a replica of 4 ranks does not divide the 1 ranks"):
        fitting(with_layouts(config, TP2), 1)


def test_a_layout_that_the_model_does_not_allow_is_refused_from_the_start(config: Config) -> None:
    config = with_layouts(config, ALONE, LLMLayoutConfig(tp=3))
    arrangement = resolve_layout(config.layout, config.placement, tuple(config.model.encoders), 4)
    with pytest.raises(LayoutError, match=r"launch\.layouts\[1\]: .*heads"):
        check_layout(config.model.llm, {}, arrangement, config.launch.layouts, vocab_size=300)


@pytest.mark.parametrize(
    ("domain", "sizes", "said"),
    [
        (1, LLMLayoutConfig(zero=2), r"cp=1 and layout\.domain=1 .*: set layout\.domain=2, or "),
        (None, LLMLayoutConfig(zero=3, dp=1), r"\[1\]\.dp=1 .*: set launch\.layouts\[1\]\.dp=2, or "),
    ],
)
def test_a_layout_that_divides_over_pools_of_one_rank_is_refused_from_the_start(
    config: Config, domain: int | None, sizes: LLMLayoutConfig, said: str
) -> None:
    own = replace(config, layout=replace(config.layout, domain=domain))
    refused = rf"launch\.layouts\[1\]\.zero={sizes.zero} .*{said}launch\.layouts\[1\]\.zero=1"
    with pytest.raises(LayoutError, match=refused):
        prepare_run(with_layouts(own, TP2, sizes), 4)


def test_a_world_whose_pools_would_have_one_rank_is_passed_over(config: Config) -> None:
    """Two ranks that share no layers can divide what they hold; one rank cannot."""
    chosen = replace(config, layout=replace(config.layout, domain=None))
    divided = with_layouts(chosen, LLMLayoutConfig(zero=2))
    assert fitting(divided, 2)[0].layout.llm.zero == 2
    with pytest.raises(LayoutError, match="does not divide the 1 ranks"):
        fitting(divided, 1)
    assert fitting(with_layouts(divided, *divided.launch.layouts, ALONE), 1)[0].layout.llm.zero == 1


def _sit(rank: int, config: Config, path: Path, port: int) -> Seat:
    """Find a seat as one of three ranks that torchrun has started; stand by if there is none."""
    described = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "MASTER_PORT": port}
    described |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
    with mock.patch.dict(os.environ, {key: str(of) for key, of in described.items()}):
        seat = find_seat(config, RunFolder(path))
        if seat.rank is None:
            stand_by(seat)
        elif seat.rank == 0:
            end_standing_by(seat)
        return seat


def test_a_rank_that_was_slow_is_left_out_if_asked_and_stands_by_to_the_end(
    ranks: RankPool, config: Config, tmp_path: Path
) -> None:
    """But never so many that no layout fits the others."""
    config = with_layouts(config, ALONE)
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        remember_slow(RunFolder(tmp_path))
        remember_slow(RunFolder(tmp_path))
    assert (tmp_path / "slow_ranks.txt").read_text() == f"{socket.gethostname()}:0\n"
    asked = replace(config, health=replace(config.health, exclude_slow=True))
    all_of_them = replace(asked.layout, llm=LLMLayoutConfig(pp=3))
    for given, seats in (
        (config, [0, 1, 2]),
        (asked, [None, 0, 1]),
        (with_layouts(replace(asked, layout=all_of_them)), [0, 1, 2]),
    ):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found = ranks.run(3, _sit, given, tmp_path, store.port)
        assert [seat.rank for seat in found] == seats
        assert {seat.world for seat in found} == {len(seats) - seats.count(None)}


def test_what_no_agent_of_ours_started_is_refused_where_ranks_may_have_to_stand_by(
    config: Config, tmp_path: Path
) -> None:
    asked = replace(config, health=replace(config.health, exclude_slow=True))
    described = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with mock.patch.dict(os.environ, described), pytest.raises(ConfigError, match=r"python -m infra\.agent"):
        find_seat(asked, RunFolder(tmp_path))


def test_nodes_with_unequal_numbers_of_ranks_are_refused_on_each_of_them(
    config: Config, tmp_path: Path
) -> None:
    described = {"RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
    for own, would in ((2, 4), (6, 12)):
        said = (
            f"GROUP_WORLD_SIZE=2, LOCAL_WORLD_SIZE={own}, WORLD_SIZE=8: .* have {would}: .*same --nproc-per"
        )
        with (
            mock.patch.dict(os.environ, described | {"LOCAL_WORLD_SIZE": str(own)}),
            pytest.raises(ConfigError, match=said),
        ):
            find_seat(config, RunFolder(tmp_path))
    with mock.patch.dict(os.environ, described | {"LOCAL_WORLD_SIZE": "4"}):
        assert find_seat(config, RunFolder(tmp_path)).world == 8
