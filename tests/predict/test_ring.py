"""The ring of visits: by hand."""

import numpy as np

from rollalloc.predict import ring


def filled(events, prompts):
    memory = ring.empty(events)
    for prompt in prompts:
        ring.append(memory, prompt, 0.5, 1, 1, 0.5, 0.5, 0.0, 0.0, 0.0)
    return memory


def test_slots_are_oldest_first_and_each_once():
    memory = filled(4, [10, 11, 12, 13, 14, 15])
    assert memory["event_prompt"][ring.slots(memory, 0, 6)].tolist() == [12, 13, 14, 15]
    assert memory["event_prompt"][ring.slots(memory, 3, 5)].tolist() == [13, 14]
    assert ring.slots(memory, 0, 2).size == 0
    assert ring.slots(filled(4, []), 0, 0).size == 0


def test_slots_pass_over_prompts_that_are_gone():
    memory = filled(4, [10, ring.GONE, 12])
    assert memory["event_prompt"][ring.slots(memory, 0, 3)].tolist() == [10, 12]
    assert np.isin(ring.slots(memory, 0, 3), [0, 2]).all()
