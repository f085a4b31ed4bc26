"""Registry of cost models by name."""

from bitcycle.hardware.base import HardwareOptions
from bitcycle.hardware.bitfusion import BitFusion
from bitcycle.hardware.bitops import BitOps
from bitcycle.hardware.combined import AllHardware
from bitcycle.hardware.tensorcore import TensorCore
from bitcycle.hardware.zc706 import Zc706
from bitcycle.settings import Preset, chosen, registry

HARDWARE: dict[str, Preset[HardwareOptions]] = registry(
    {
        "bitops": Preset(BitOps, "bit operations, GBitOps and effective MACs"),
        "bitfusion": Preset(
            BitFusion,
            "energy and latency on the Bit Fusion accelerator that FracTrain simulates, and bit operations",
        ),
        "zc706": Preset(Zc706, "latency on the FPGA board of CPT, and bit operations"),
        "tensorcore": Preset(
            TensorCore, "time at the published peak rates of an H100, B200 or MI355X, and bit operations"
        ),
        "all": Preset(AllHardware, "all cost models side by side"),
    }
)
"""Cost model name -> its options."""


def hardware_options(hardware: str | HardwareOptions) -> HardwareOptions:
    """The options of a cost model given by name, or the options themselves.

    Raises:
        SettingError (a ValueError): for an unknown name.
    """
    return hardware if isinstance(hardware, HardwareOptions) else chosen("hardware", HARDWARE, hardware)()
