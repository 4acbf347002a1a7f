"""One rank that joins the others, `joining_ranks.py JOIN_S RANK:WHERE ...`: the named ranks stop at that place.

`before` stands before a rank has answered anybody, `met` after all ranks have met at the store.
"""

import os
import signal
import sys

OWN = [place.partition(":")[2] for place in sys.argv[2:] if place.partition(":")[0] == os.environ["RANK"]]


def stop_at(place: str) -> None:
    if place in OWN:
        # to this thread: sent to the process, it lets this thread go on until another one has taken it
        signal.raise_signal(signal.SIGSTOP)


if __name__ == "__main__":
    stop_at("before")

    import torch
    import torch.distributed as dist

    from flatout.errors import FlatoutError
    from flatout.parallel.process_group import join_group, leave_group
    from flatout.parallel.rank import Rank

    def on_met(store: dist.Store) -> None:
        stop_at("met")
        if os.environ["RANK"] == "0":
            store.set("word", "hello")
        store.get("word")

    rank = Rank.from_env()
    try:
        join_group(rank, torch.device("cpu"), join_s=float(sys.argv[1]), on_met=on_met)
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"sum {total.item():.0f}", flush=True)
        leave_group()
    except FlatoutError as error:
        print(f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}", flush=True)
        sys.exit(error.exit_code)
