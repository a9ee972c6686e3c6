"""The type of arrays that planning and loading count with."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
