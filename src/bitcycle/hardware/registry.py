"""The cost models by name, and all of them together: `hardware=all`."""

from dataclasses import dataclass, fields, replace

from bitcycle.hardware.base import Cost, HardwareOptions
from bitcycle.hardware.bitfusion import BitFusion
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.latency import TensorCore, Zc706
from bitcycle.hardware.operation import SampleCounts, Workload
from bitcycle.precision import Precision
from bitcycle.presets import Presets


@dataclass
class AllHardware(HardwareOptions):
    """Bit operations, Bit Fusion, ZC706 and peak rates under the same counting rules, each with its default constants.

    The fields of the cost itself are bit operations, which are the same for all; `by_hardware` holds the cost of each
    model, since energies and latencies of different machines cannot be added.
    """

    name: str = "all"

    def measure(self, workload: Workload, counts: SampleCounts, reference: Precision) -> Cost:
        rules = {rule.name: getattr(self, rule.name) for rule in fields(HardwareOptions) if rule.name != "name"}
        costs = {}
        for kind in (BitOps, BitFusion, Zc706, TensorCore):
            model = kind(**rules)
            costs[model.name] = model.measure(workload, counts, reference)
        return replace(costs["bitops"], by_hardware=costs)


HARDWARE: Presets[HardwareOptions] = Presets("hardware")
"""Cost model name -> its options."""


def hardware_options(hardware: str | HardwareOptions) -> HardwareOptions:
    """The options of a cost model given by name, or the options themselves. Raises SettingError for an unknown name."""
    return hardware if isinstance(hardware, HardwareOptions) else HARDWARE.chosen(hardware)()
