"""What the ranks of an engine make known of themselves comes from one of those that vLLM takes for the same."""

import multiprocessing
import traceback
from types import SimpleNamespace

import torch

from kvferry.vllm import neighbours

#: Of each group: its ranks.
STAGES = [[0, 2], [1, 3]]
CONTEXTS = [[0, 1], [2, 3]]
ALONE = [[0], [1], [2], [3]]


def gathered(path, kinds):
    """What each of four ranks gathers in its groups of these kinds."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    over = context.Barrier(4)
    args = (path, kinds, results, over)
    ranks = [context.Process(target=one, args=(rank, *args), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    made = {}
    for _ in ranks:
        rank, cards = results.get(timeout=120)
        assert not isinstance(cards, str), f"rank {rank}: {cards}"
        made[rank] = cards
    for process in ranks:
        process.join(60)
    return [made[rank] for rank in range(4)]


def one(rank, path, kinds, results, over):
    try:
        take_part(rank, path, kinds, results, over)
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def take_part(rank, path, kinds, results, over):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    groups = []
    for kind in kinds:
        for ranks in kind:
            # Every process takes part in making every group.
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                first = ranks[0] == rank
                groups.append(SimpleNamespace(world_size=len(ranks), cpu_group=group, is_first_rank=first))
    results.put((rank, neighbours.gather(b"card %d" % rank, groups)))
    # Nobody leaves while another is still connecting to all: torch has no barrier behind its making of groups.
    over.wait(120)
    torch.distributed.destroy_process_group()


def cards(*ranks):
    return tuple(b"card %d" % rank for rank in ranks)


def test_ranks_alone_speak_for_themselves(tmp_path):
    assert gathered(tmp_path / "store", [ALONE, ALONE]) == [cards(rank) for rank in range(4)]


def test_the_first_stage_speaks_for_all(tmp_path):
    assert gathered(tmp_path / "store", [STAGES, ALONE]) == [cards(0, 2), cards(1, 3), None, None]


def test_the_first_part_of_a_context_speaks_for_all(tmp_path):
    assert gathered(tmp_path / "one", [ALONE, CONTEXTS]) == [cards(0, 1), None, cards(2, 3), None]
    assert gathered(tmp_path / "both", [STAGES, CONTEXTS]) == [cards(0, 2, 1, 3), None, None, None]
