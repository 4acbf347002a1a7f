"""Run folders: whose they are, and what their files say while a run trains and after it.

is_run_folder, run_identity, require_own, foreign_entries, free_folder   whose a folder is, and its other files
read_run, read_end, read_side_files                                       what a run has written so far
RunFollower, LineFollower                                                 what is new since the last look
record_of, StepRecord                                                     a line of metrics.jsonl as a record
MemoryCallback                                                            keeps what a run reports, as it does so
RunNotes, write_notes                                                     the note and the tags of a run
"""

from flatout.config.folders import RUN_NAME as RUN_NAME
from flatout.config.folders import foreign_entries as foreign_entries
from flatout.config.folders import free_folder as free_folder
from flatout.config.folders import is_run_folder as is_run_folder
from flatout.config.folders import require_own as require_own
from flatout.config.folders import run_identity as run_identity
from flatout.track.callback import MemoryCallback as MemoryCallback
from flatout.track.record import StepRecord as StepRecord
from flatout.track.run_log import LineFollower as LineFollower
from flatout.track.run_log import RunFollower as RunFollower
from flatout.track.run_log import RunNotes as RunNotes
from flatout.track.run_log import read_end as read_end
from flatout.track.run_log import read_run as read_run
from flatout.track.run_log import read_side_files as read_side_files
from flatout.track.run_log import record_of as record_of
from flatout.track.run_log import write_notes as write_notes
