"""A fuzz of the tools: many cases, drawn by a seed, each with what has to come out of it.

    python -m tests.fuzz                           # all of them, about ten minutes on two cores
    python -m tests.fuzz --list                    # their names, and how many there are of each kind and for each tool
    python -m tests.fuzz --only 'damage/eval-*'    # some, by a pattern of their names
    python -m tests.fuzz --seed 7 --jobs 4         # others of the same kinds

It stands beside the test suite, which does not collect it: it takes minutes, and what it tries changes with the seed.
The process imports everything once and forks itself for each case, which then has a folder and a process of its own.
Of every case, whatever else it expects, these hold:

- it ends within its time, and no process of it stays behind;
- the exit code is 0, or it is 1 and the last line on stderr is one that begins with "error: ". There is no traceback;
- the files that stood before are unchanged, to the byte, but for those that the case calls the tool's own;
- where it fails it leaves no file behind, but for those that the case names.

`case.py` has what a case is and how it is judged, `process.py` the forked process, `material.py` what all cases start
from (pictures, shards, a trained run and what the tools make of it), `damage.py` and `lines.py` what is drawn by the
seed, and `kinds/` the cases. A failure is printed with the command that repeats it alone.
"""
