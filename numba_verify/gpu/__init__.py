"""The one place that knows numba-cuda: instructions, compiler, launcher, and the simulator that stands in for a GPU."""

import numpy

if not hasattr(numpy, "row_stack"):
    # NumPy 2.5 removed row_stack; numba-cuda 0.30.4 (frozen upstream) still names it while it is imported. Here, because whatever in
    # this package imports numba.cuda has imported this first.
    numpy.row_stack = numpy.vstack
