"""The benchmark of heartbeats in small: a rank's requests do not grow with the number of ranks."""

import sys
from collections import Counter

from scripts.proofs.ranks import play_ranks
from tests.support import ROOT


def requests_of(num_ranks: int) -> tuple[float, float]:
    """Requests and keys per rank in a second, which has two ticks, on real clients of one store."""
    sys.path.insert(0, str(ROOT / "scripts" / "bench"))
    import beats
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counts: Counter[str] = Counter()
    everyone = range(num_ranks)
    ranks = beats.simulate(everyone, num_ranks, store.port, 60.0, counts)
    for tick in (0, 1, 2, 3):
        if tick == 2:  # the first second makes keys that the store lacks
            counts.clear()
        for rank in ranks:
            rank._exchange_heartbeats(tick)
    requests = sum(counts[name] * weight for name, weight in beats.REQUESTS.items())
    return requests / num_ranks, counts["keys"] / num_ranks


def test_a_rank_makes_four_requests_a_second_however_many_ranks_there_are():
    assert play_ranks(requests_of, 1, 16) == [(4.0, 12.0)]
    assert play_ranks(requests_of, 1, 64) == [(4.0, 12.0)]
