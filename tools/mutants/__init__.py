"""Mutation testing, ``make mutants``: find small faults in the code that no test would notice.

For each room a seeded sample of changes is made, one node each (``changes.py``): comparisons, signs, constants,
``and``/``or``, ``not``, results replaced by None. Each is run against the tests nearest to the room (``rooms.py``), in
a copy of the working tree (``runs.py``). A mutant is killed when a test fails, survives when all pass, and is undecided
when a test takes too long or none runs at all.

A run without a change tells which tests execute which statements, in their own process or in those that they start
(``recording.py``); a mutant is run against those that execute its own. What that run found is kept in build/mutants,
for each test file, until the room, this test file or a helper of the tests changes.

Importing torch takes longer than many a room's tests: every run is forked from one process that has imported torch,
what it would import late, and pytest, and nothing of this project.
"""
