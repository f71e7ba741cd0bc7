"""The seam to SGLang: the only package that imports it (`protocol.py` does not)."""

import warnings

# At import SGLang warns about accelerators that this machine does not have.
warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
