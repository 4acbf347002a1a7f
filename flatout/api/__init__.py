"""What `import flatout` offers: training, planning and finished runs from Python; and what adds a verb to it."""

from flatout.api.commands import Verb as Verb
