"""Where a run goes on: the newest checkpoint, if it belongs to these settings and these data."""

from __future__ import annotations

from flatout.config.read import make_config
from flatout.config.schema import Config
from flatout.errors import CheckpointError
from flatout.track.record import Tracker
from flatout.train.checkpoint import Checkpoints
from flatout.train.planning import Planned
from flatout.train.resume import config_changes, is_complete, refuse_changes, refuse_other_data
from flatout.train.stored import Stored


def find_checkpoint(config: Config, planned: Planned, checkpoints: Checkpoints, tracker: Tracker) -> Stored | None:
    """The snapshot to go on from; None to start at step 0.

    Raises CheckpointError when none of the folder's checkpoints is valid, or when settings or data that change the
    maths are not those of the checkpoint.
    """
    snapshot = checkpoints.newest()
    if snapshot is None:
        tracker.stage("resume", "nothing to resume: from step 0")
        return None
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{checkpoints.folder} holds a checkpoint of step {snapshot.step}, and checkpoint.resume is never; "
            "choose another run_dir or set checkpoint.resume=auto"
        )
    if not is_complete(snapshot.step, planned.plan.num_steps):
        # settings that are newer than the checkpoint had their defaults when it was made
        saved = make_config(snapshot.facts["config"], origin=f"the config of step {snapshot.step}")
        changes = config_changes(saved.model_dump(mode="json"), config.model_dump(mode="json"))
        allow = config.checkpoint.allow_change
        refuse_changes(changes, allow)
        refuse_other_data(snapshot.facts["fingerprints"], planned.fingerprints, allow=allow, explained_by=changes)
        for change in changes:
            tracker.event("changed", {"setting": str(change)})
    tracker.stage("resume", f"from step {snapshot.step}")
    return snapshot
