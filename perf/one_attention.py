"""One attention kernel on random data, for profilers: a few launches, or launches for some seconds.

    python perf/one_attention.py [S] [softcap or none] [seconds] [key=value of the tuning, ...]
"""

import sys
import time

import torch
from bench_attention import attention_kernel, draw, target

from cute_gemma import jit

s, cap, seconds = int(sys.argv[1]), None if sys.argv[2] == "none" else float(sys.argv[2]), float(sys.argv[3])
kernel = attention_kernel(1, s, 24, 8, 128, cap, **{k: int(v) for k, v in (a.split("=") for a in sys.argv[4:])})
q, k, v = draw(1, s, 24, 8, 128)
out = torch.empty_like(q)
jit.launch(kernel, q, k, v, out, target=target())
torch.cuda.synchronize()
launches, stop = 0, time.time() + seconds
while launches < 3 or time.time() < stop:
    jit.launch(kernel, q, k, v, out, target=target())
    launches += 1
    if launches % 100 == 0:
        torch.cuda.synchronize()
torch.cuda.synchronize()
