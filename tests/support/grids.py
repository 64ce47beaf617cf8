"""How `combine` overlaps with the kernel before it, in machine code: opcodes of one kernel, for sm_90 and later.

PREEXIT is griddepcontrol.launch_dependents, ACQBULK griddepcontrol.wait.
"""


def check_lets_combine_start(opcodes):
    """mma, wgmma: ordinary launches, which say so once."""
    assert opcodes.count("PREEXIT") == 1 and "ACQBULK" not in opcodes


def check_waits(opcodes, table_loads):
    """combine: before it waits it reads the merge table, in at most `table_loads` loads, and nothing else; it does not end without."""
    assert opcodes.count("ACQBULK") == 2 and "PREEXIT" not in opcodes
    before = opcodes[:opcodes.index("ACQBULK")]
    assert 0 < sum(name.startswith("LDG.") for name in before) <= table_loads
    assert not any(name.startswith(("LDGSTS", "STG", "RED", "ATOM")) for name in before)
    # An empty grid would end there: numba asks whether the step of a range is 0.
    assert before.count("EXIT") <= 1 and opcodes[-1 - opcodes[::-1].index("EXIT") - 1] == "ACQBULK"
