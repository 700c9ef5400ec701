"""Whether the system lets this process, and those that it forks, multiply matrices of bfloat16 by the tiles of AMX."""

import torch

HAS_TILES: bool = torch.cpu._init_amx()
