"""What did the compilers make of the kernels? Registers, memory and instructions, no GPU needed. Lower is better."""

from __future__ import annotations

try:
    from . import common, resources
except ImportError:  # run as a script
    import common
    import resources


def _figure(found, name):
    return common.figure_or_failure(found if isinstance(found, str) else found[name])


class Offline:
    """512/64 in bfloat16. cuda_ref needs nvcc; instruction counts need nvdisasm (and cuobjdump for cuda_ref). What is missing reads n/a."""

    params = [common.IMPLEMENTATIONS, resources.COMPILED, resources.ARCHITECTURES]
    param_names = ["impl", "kernel", "arch"]
    timeout = 60

    collect = staticmethod(resources.collect)

    def setup_cache(self):
        return resources.collect(common.all_keys(Offline))

    setup_cache.timeout = 1200

    def setup(self, figures, impl, kernel, arch):
        common.figure_or_skip(figures.get((impl, kernel, arch), f"{impl} was not compiled here"))

    def track_registers(self, figures, *key):
        return _figure(figures[key], "registers")

    def track_shared_bytes(self, figures, *key):
        return _figure(figures[key], "shared_bytes")

    def track_spill_bytes(self, figures, *key):
        return _figure(figures[key], "spill_bytes")

    def track_stack_bytes(self, figures, *key):
        return _figure(figures[key], "stack_bytes")

    track_registers.unit = "registers"
    track_shared_bytes.unit = track_spill_bytes.unit = track_stack_bytes.unit = "bytes"
    for _function in (track_registers, track_shared_bytes, track_spill_bytes, track_stack_bytes):
        _function.version = "1"
    del _function


class Instructions:
    """Machine instructions of a kernel, padding left out."""

    params = Offline.params
    param_names = Offline.param_names
    timeout = 60

    collect = Offline.collect
    setup_cache = Offline.setup_cache

    def setup(self, figures, impl, kernel, arch):
        figure = figures.get((impl, kernel, arch), f"{impl} was not compiled here")
        common.figure_or_skip(figure)
        if not isinstance(figure, str) and figure["sass"] is None:
            raise common.skip("no disassembler is here")

    def track_sass_instructions(self, figures, *key):
        return _figure(figures[key], "sass")

    track_sass_instructions.unit = "instructions"
    track_sass_instructions.version = "1"


if __name__ == "__main__":
    print(resources.format_resources(resources.numba_resources() + resources.cuda_ref_resources()))
