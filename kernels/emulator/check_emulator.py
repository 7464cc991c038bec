"""Does the emulator see faults? Waits, fences, arrivals and barriers of working kernels are taken out one by one.

Each change must lead to a message or to wrong numbers with one of a few seeds. What goes unseen is printed: some of it
is harmless, such as a wait for what another wait has seen already.
"""

import re
import sys
from collections.abc import Iterator

import check_backward
import check_forward
import check_kl
import torch
from cases import Case, here

import emulator

SEEDS = 4
KINDS = {
    # An instruction, and what stands for it.
    "wait": (r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), [^;]*;", r"setp.eq.u32 \1, 0, 0;"),
    "proxy fence": (r"fence\.proxy\.async[^;]*;", ""),
    "product's wait": (r"wgmma\.wait_group\.sync\.aligned\s+\d+;", ""),
    "barrier": (r"bar\.sync[^;]*;", ""),
    "arrival": (r"mbarrier\.arrive\.shared\.b64[^;]*;", "bar.warp.sync -1;"),
    "copies' wait": (r"cp\.async\.wait_(group|all)[^;]*;", ""),
}


def changes(text: str) -> Iterator[tuple[str, str]]:
    for name, (pattern, instead) in KINDS.items():
        for number, found in enumerate(re.finditer(pattern, text)):
            line = text.count("\n", 0, found.start()) + 1
            changed = text[: found.start()] + found.expand(instead) + text[found.end() :]
            yield f"{name} {number} (line {line})", changed


def main(kernel: str) -> None:
    module = {"Attend": check_forward, "Merge": check_forward, "ProxyKL": check_kl}.get(kernel, check_backward)
    case = Case(sequence=400, heads=4)
    with here(), emulator.installed():
        module.check(case, 0)
    target = next(k for k in emulator.loaded() if type(k).__name__ == kernel)
    whole = emulator.load(target)
    unseen = total = 0
    for what, changed in changes(whole.ptx.read_text()):
        emulator.loaded()[target] = emulator.Emulated(target, lambda _, text=changed: text)
        said = ""
        for seed in range(SEEDS):
            try:
                with here(), emulator.installed(seed=seed, steps=50_000_000):
                    wrong = [n for n, (value, most) in module.check(case, 0).items() if not value <= most]
                said = f"wrong {' '.join(wrong)}" if wrong else ""
            except RuntimeError as error:
                said = str(error).split("): ", 1)[-1].split("\n")[0]
            if said:
                break
        total += 1
        unseen += not said
        print(f"{what}: {said[:150] or 'NOT SEEN'}", flush=True)
    print(f"{kernel}: {total} changes, {unseen} not seen")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in sys.argv[1:] or ("Attend", "Merge", "Backward", "ProxyKL"):
        main(one)
