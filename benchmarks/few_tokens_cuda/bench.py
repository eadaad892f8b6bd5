"""Check and time few.cu beside Triton's few-token kernels. `--build`: only build with nvcc, here. `--warm`: only Triton."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent), str(HERE.parent.parent / "benchmarks")]
from few import Config, Kernel, build_with_nvcc, compile_with_nvrtc

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
C = Config


def variants(name, tok):
    """The first is also checked with other numbers of tokens."""
    big = tok >= 32
    if name == "o":
        if big:
            yield C(tok, 2, 128, cn=2, gp=4, wst=6, xst=4)
            yield C(tok, 2, 128, cn=1, gp=4, wst=6, xst=4)
            yield C(tok, 2, 128, cn=2, gp=4, wst=4, xst=2, minb=2)
            yield C(tok, 3, 144, cn=2, ck=4, wst=6, xst=4)
            yield C(tok, 3, 144, cn=2, ck=4, wst=6, xst=4, src=1)
            yield C(tok, 2, 128, cn=1, ck=4, wst=3, xst=2, minb=2)
            yield C(tok, 2, 128, cn=1, ck=4, wst=3, xst=2, minb=2, src=1)
            yield C(tok, 2, 128, cn=2, ck=4, wst=3, xst=2, minb=2)
        else:
            yield C(tok, 1, 64, cn=1, gp=2, wst=9, xst=8, minb=2)
            yield C(tok, 1, 64, cn=1, ck=2, wst=9, xst=8, minb=2)
            yield C(tok, 1, 64, cn=1, ck=2, wst=9, xst=8, minb=2, src=1)
            yield C(tok, 2, 128, cn=1, ck=4, wst=5, xst=4, minb=2)
            yield C(tok, 2, 128, cn=1, gp=4, wst=5, xst=4, minb=2)
    if name == "qkv":
        if big:
            yield C(tok, 3, 192, cn=2, gp=4, wst=5, xst=4)
            yield C(tok, 3, 192, cn=1, gp=4, wst=5, xst=4)
            yield C(tok, 2, 96, cn=2, gp=2, wst=9, xst=4)
            yield C(tok, 4, 208, cn=2, ck=4, wst=4, xst=4)
            yield C(tok, 4, 208, cn=2, ck=4, wst=4, xst=4, src=1)
            yield C(tok, 2, 128, cn=1, ck=4, wst=3, xst=2, minb=2)
            yield C(tok, 2, 128, cn=2, ck=4, wst=3, xst=2, minb=2)
            yield C(tok, 2, 128, cn=1, ck=4, wst=3, xst=2, minb=2, src=1)
        else:
            yield C(tok, 2, 96, cn=1, gp=2, wst=7, xst=8, minb=2)
            yield C(tok, 2, 96, cn=1, ck=2, wst=7, xst=8, minb=2)
            yield C(tok, 2, 128, cn=1, ck=4, wst=5, xst=4, minb=2)
            yield C(tok, 2, 128, cn=1, ck=4, wst=5, xst=5, minb=2, src=1)
            yield C(tok, 3, 192, cn=1, gp=4, wst=8, xst=8)
    if name == "down":
        if big:
            yield C(tok, 2, 128, cn=2, gp=4, wst=8, xst=4)
            yield C(tok, 2, 128, cn=1, gp=4, wst=8, xst=4)
            yield C(tok, 4, 256, cn=2, gp=8, wst=4, xst=4)
            yield C(tok, 3, 144, cn=2, ck=4, wst=6, xst=4)
            yield C(tok, 3, 144, cn=1, ck=4, wst=6, xst=4)
            yield C(tok, 3, 144, cn=1, ck=4, wst=6, xst=4, src=1)
        else:
            yield C(tok, 2, 128, cn=1, gp=4, wst=10, xst=8)
            yield C(tok, 2, 128, cn=1, gp=4, wst=5, xst=4, minb=2)
            yield C(tok, 3, 144, cn=1, ck=4, wst=9, xst=8)
            yield C(tok, 3, 144, cn=1, ck=4, wst=10, xst=10, src=1)
    if name == "gate_up":
        if big:
            yield C(tok, 4, 112, gated=1, cn=2, wst=5, xst=4)
            yield C(tok, 4, 112, gated=1, cn=1, wst=5, xst=4)
            yield C(tok, 4, 120, gated=1, cn=4, wst=5, xst=3)
            yield C(tok, 4, 112, gated=1, cn=2, wst=5, xst=4, src=1)
            yield C(tok, 4, 112, gated=1, cn=1, wst=5, xst=4, src=1)
            yield C(tok, 2, 112, gated=1, tm=2, cn=2, wst=5, xst=4)
        else:
            yield C(tok, 4, 112, gated=1, wst=6, xst=6)
            yield C(tok, 4, 112, gated=1, wst=7, xst=7, src=1)


def diagnostics(name, tok):
    """Of the first variant, for timing only, with wrong results (DIAG in few2.cu)."""
    first = next(iter(variants(name, tok)))
    for diag in (1, 4, 5) if name in ("gate_up", "down") else (1,):
        yield replace(first, diag=diag)


def every_variant():
    found = {}
    for name in SHAPES:
        for tok in (8, 64):
            for c in diagnostics(name, tok):
                found[c] = None
    for name in SHAPES:
        for tok in (8, 64):
            for c in variants(name, tok):
                found[c] = None
        for tok in (16, 32):
            found[next(iter(variants(name, tok)))] = None
    for name in ("qkv", "gate_up"):
        found[replace(next(iter(variants(name, 64))), mode=1)] = None
    return list(found)


def build():
    import re
    def one(c):
        return c, build_with_nvcc(c)
    with ThreadPoolExecutor(2) as pool:
        for c, log in pool.map(one, every_variant()):
            if log:
                part = log[log.find("few_product"):] if "few_product" in log else log
                spill = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log)
                regs = re.findall(r"Used (\d+) registers", log)
                print(c.tok, c.short(), "smem", c.smem, "regs", regs, "stack", spill, "C75" if "C75" in log else "", flush=True)


def main():
    import torch
    import few_tokens as bench_tokens
    from octavo.kernels import few_tokens as triton_kernels

    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--src", type=int, help="only this version: 1 (few.cu, measured) or 2 (few2.cu)")
    parser.add_argument("--no-triton", action="store_true")
    options = parser.parse_args()
    if options.src:
        global variants, diagnostics
        every_one = variants
        variants = lambda name, tok: (c for c in every_one(name, tok) if c.src == options.src)
        if options.src == 1:
            diagnostics = lambda name, tok: ()
    began = time.perf_counter()

    def linears():
        lin = bench_tokens.Linears.__new__(bench_tokens.Linears)
        copies = 1 if options.warm else None
        lin.cases = {n: bench_tokens.make_case(n, "channel", copies)._replace(adapters=[]) for n in SHAPES}
        lin.norm = bench_tokens.Norm((torch.rand(4096, device="cuda") + 0.5).to(torch.bfloat16), 1e-5)
        return lin

    if options.warm:
        lin = linears()
        for m in (64, 1):
            for name in ("qkv", "o", "mlp"):
                lin.run(name, bench_tokens.tokens_of(m, 4096))(0)
        torch.cuda.synchronize()
        print(f"Triton warm after {time.perf_counter() - began:.0f} s", flush=True)
        return 0

    warm = None if options.no_triton else subprocess.Popen([sys.executable, __file__, "--warm"])
    configs = every_variant()
    torch.cuda.init(); torch.zeros(1, device="cuda")
    how = {}

    def image_of(c):
        try:
            image = compile_with_nvrtc(c)
            return c, image, "nvrtc"
        except Exception as error:
            how.setdefault("error", str(error)[:600])
            return c, c.cubin().read_bytes(), "nvcc"

    with ThreadPoolExecutor(12) as pool:
        images = list(pool.map(image_of, configs))
    for _, _, by in images:
        how[by] = how.get(by, 0) + 1
    kernels = {c: Kernel(c, image) for c, image, _ in images}
    print(f"compiled: {how}; {time.perf_counter() - began:.1f} s", flush=True)
    odd = {(c.tok, c.short()): k.attributes() for c, k in kernels.items()}
    print("local memory:", {k: v for k, v in odd.items() if v[1]}, "most registers", max(v[0] for v in odd.values()))
    bf16 = torch.bfloat16
    stream = lambda: torch.cuda.current_stream().cuda_stream

    def laid_out(kernel, x, early=False):
        m, k = x.shape
        out = torch.full((kernel.config.tok * k,), float("nan"), device="cuda", dtype=torch.float16)
        factors = torch.full((64,), float("nan"), device="cuda")
        return kernel.lay_out(x, out, factors, early), out, factors

    # --- checks
    wrong = []
    lin = linears()
    torch.manual_seed(1)

    def reference(name, w, scale, x, mode, residual):
        wide = w.double()
        s = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1) if mode else scale.double()
        y = x.double() @ (wide * s).t()
        bound = (x.double().abs() @ (wide * s).abs().t())
        if name == "gate_up":
            g, u = y.chunk(2, 1)
            return torch.nn.functional.silu(g) * u, None
        if residual is not None:
            y = y + residual.double()
        return y, bound

    def check(name, c, m, nan=False):
        n, k = SHAPES[name]
        kernel, w = kernels[c], lin.cases[name].weights[0].data
        if nan:
            w = w.clone()
            bits = w.view(torch.uint8)
            bits[7, 1000], bits[8, 1001] = 0x7F, 0xFF
        shape = (n // 128, k // 128) if c.mode else (n, 1)
        scale = (torch.randn(shape, device="cuda").abs() + 0.5) / k**0.5
        x = torch.randn(m, k, device="cuda").to(bf16) * torch.exp2(torch.randint(-20, 20, (m, 1), device="cuda").float()).to(bf16) if name != "gate_up" else torch.randn(m, k, device="cuda").to(bf16)
        outputs = n // (1 + c.gated)
        residual = torch.randn(m, n, device="cuda").to(bf16) if name in ("o", "down") else None
        prepare, out, factors = laid_out(kernel, x)
        ys = []
        for _ in range(3):
            y = torch.full((m + 1, outputs), float("nan"), device="cuda", dtype=bf16)
            prepare(stream())
            kernel.product(w, scale, out, factors, y, m, residual, early=True)(stream())
            torch.cuda.synchronize()
            ys.append(y)
        what = f"{name} M={m} tok{c.tok} {c.short()}"
        if not ys[0][m].isnan().all():
            wrong.append(f"{what}: wrote past M")
        y = ys[0][:m]
        if any(not torch.equal(y.view(torch.int16), other[:m].view(torch.int16)) for other in ys[1:]):
            wrong.append(f"{what}: other bits")
        if nan:
            rows = slice(7, 9)
            if not y[:, rows].isnan().all() or int(y.isnan().sum()) != 2 * m:
                wrong.append(f"{what}: NaN lost or spread ({int(y.isnan().sum())})")
            return 0.0
        expected, bound = reference(name, w, scale, x, c.mode, residual)
        off = ((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        if not off < 2.5e-3:
            wrong.append(f"{what}: {off:.2e} off")
        if bound is not None:
            limit = 2.0**-8 * expected.abs() + k * 2.0**-24 * bound + 1e-30
            over = ((y.double() - expected).abs() / limit).max().item()
            if not over <= 1:
                wrong.append(f"{what}: {over:.2f} times the bound")
        return off

    worst = 0.0
    done = 0
    try:
        for name in SHAPES:
            for m in (1, 5, 16, 33, 64):
                tok = next(t for t in (8, 16, 64) if m <= t)
                worst = max(worst, check(name, next(iter(variants(name, tok))), m)); done += 1
            worst = max(worst, check(name, next(iter(variants(name, 32))), 29)); done += 1
            for tok in (8, 64):
                check(name, next(iter(variants(name, tok))), tok, nan=True)
                for c in list(variants(name, tok))[1:]:
                    worst = max(worst, check(name, c, tok - 3)); done += 1
        for c in configs:
            if c.mode and not c.diag:
                worst = max(worst, check("gate_up" if c.gated else "qkv", c, 64)); done += 1
    finally:
        print(f"checked {done}, worst {worst:.2e}; wrong: {wrong or 'none'}; {time.perf_counter() - began:.1f} s", flush=True)

    # --- spread over SMs
    from few import Launch, byref, c_int, cuda
    some = kernels[next(iter(variants("gate_up", 64)))]
    fits = {}
    for size in range(1, 17):
        launch, count = Launch(some.function, size * 132, 576, 200000, {"params": []}, size), c_int()
        rc = cuda().cuOccupancyMaxActiveClusters(byref(count), some.function, byref(launch.config))
        fits[size] = count.value if rc == 0 else f"error {rc}"
    print("clusters of a size that fit, one CTA an SM:", fits, flush=True)
    for c in {c for name in SHAPES for c in variants(name, 64)}:
        name = next(n for n in SHAPES if c in list(variants(n, 64)))
        n, k = SHAPES[name]
        kernel = kernels[c]
        _, out, factors = laid_out(kernel, torch.randn(64, k, device="cuda").to(bf16))
        out.zero_(); factors.fill_(1)
        grid = kernel.product(lin.cases[name].weights[0].data, torch.ones(n, device='cuda'), out, factors, out, 64).config.grid[0]
        where = torch.full((grid,), -1, device="cuda", dtype=torch.int32)
        y = torch.empty(64, n, device="cuda", dtype=bf16)
        kernel.product(lin.cases[name].weights[0].data, torch.ones(n, device="cuda"), out, factors, y, 64, where=where)(stream())
        torch.cuda.synchronize()
        per = where.bincount(minlength=132)
        print(f"{name} {c.short()}: {grid} CTAs on {int((per > 0).sum())} SMs, most {int(per.max())}; clusters at once {kernel.most_clusters()}", flush=True)

    if warm is not None:
        try:
            warm.wait(timeout=25)
        except subprocess.TimeoutExpired:
            print("Triton is not warm yet", flush=True)

    # --- times
    def time_graph(run, count):
        return 1e6 * bench_tokens.time_graph(run, count, 2e-3)

    rows = []
    for name in SHAPES:
        n, k = SHAPES[name]
        weights = [each.data for each in lin.cases[name].weights]
        for m in (64, 1):
            tok = 64 if m == 64 else 8
            x = torch.randn(m, k, device="cuda").to(bf16)
            scale = torch.rand(n, 1, device="cuda")
            blocks = [c for c in configs if c.mode and tok == 64 and name == ('gate_up' if c.gated else 'qkv')]
            for c in [*variants(name, tok), *blocks, *diagnostics(name, tok)]:
                kernel = kernels[c]
                y = torch.empty(m, n // (1 + c.gated), device="cuda", dtype=bf16)
                prepare, out, factors = laid_out(kernel, x)
                prepare_early = kernel.lay_out(x, out, factors, True)
                prepare(stream())
                plain = [kernel.product(w, scale, out, factors, y, m) for w in weights]
                early = [kernel.product(w, scale, out, factors, y, m, early=True) for w in weights]
                def with_prepare(first):
                    def run(i):
                        first(stream()); early[i](stream())
                    return run
                times = [time_graph(run, len(weights)) for run in (
                    lambda i: plain[i](stream()), lambda i: early[i](stream()), with_prepare(prepare), with_prepare(prepare_early))]
                rows.append((name, m, c, times))
    print(f"timed; {time.perf_counter() - began:.1f} s", flush=True)
    triton = {}
    if not options.no_triton:
        for m in (64, 1):
            x = bench_tokens.tokens_of(m, 4096)
            for name in SHAPES:
                triton[name, m] = 1e6 * lin.time(name, x)
    print(f"Triton timed; {time.perf_counter() - began:.1f} s", flush=True)
    print("linear   M  variant                                  alone   early  lay+prod  all early   Triton (lay+prod)")
    sums = {}
    for name, m, c, times in rows:
        print(f"{name:8} {m:2} {c.short():40} " + " ".join(f"{t:7.2f}" for t in times) + f"   {triton.get((name, m), 0):7.2f}")
        for i, t in enumerate(times if not c.diag and not c.mode else ()):
            sums[m, i] = sums.get((m, i), {})
            sums[m, i][name] = min(t, sums[m, i].get(name, 1e9))
    for m in (64, 1):
        best = [sum(sums[m, i].values()) for i in range(4)]
        print(f"sum of the best, M={m}: alone {best[0]:.1f}, early {best[1]:.1f}, lay+prod {best[2]:.1f}, all early {best[3]:.1f}; "
              f"Triton {sum(v for (n, mm), v in triton.items() if mm == m):.1f}")
    print("wrong:", wrong or "none")
    return int(bool(wrong))


if __name__ == "__main__":
    if "--build" in sys.argv:
        build()
    else:
        raise SystemExit(main())
