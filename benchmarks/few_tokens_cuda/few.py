"""Compile and launch few.cu: NVRTC (or cubins that nvcc built before) and the driver API, through ctypes."""

import ctypes
import glob
import hashlib
import os
import subprocess
import threading
from ctypes import POINTER, Structure, Union, addressof, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {1: HERE / "few.cu", 2: HERE / "few2.cu"}  # as measured; the second version


@dataclass(frozen=True)
class Config:
    tok: int
    wg: int
    hr: int
    gated: int = 0
    tm: int = 1
    cn: int = 1
    ck: int = 1
    wst: int = 4
    xst: int = 4
    mode: int = 0
    minb: int = 1
    early: int = 1
    xt: int = 1
    diag: int = 0
    src: int = 2
    gp: int = 1

    def flags(self):
        return [f"-D{k}={v}" for k, v in dict(
            TOK=self.tok, WG=self.wg, HR=self.hr, GATED=self.gated, TM=self.tm, CN=self.cn, CK=self.ck, WST=self.wst,
            XST=self.xst, MODE=self.mode, MINB=self.minb, EARLY=self.early, XT=self.xt, DIAG=self.diag, GP=self.gp, SETS=2 if self.tm == 2 else 1).items()]

    @property
    def rows(self):
        return self.hr * (1 + self.gated)

    @property
    def smem(self):
        w, x = self.rows * 128, self.tok * 256
        recv = (self.ck - 1) * (self.tok // (self.ck * self.gp)) * (self.rows + 4) * 4
        return self.wst * w + self.xst * x + recv + self.rows * 4 + 256 + (2 * self.wst + 2 * self.xst + 1) * 8

    @property
    def threads(self):
        return self.wg * 128 + 64

    def short(self):
        return (f"v{self.src} r{self.hr}{'x2' if self.gated else ''} wg{self.wg}x{self.tm} n{self.cn}k{self.ck}{f'g{self.gp}' if self.gp > 1 else ''} w{self.wst}x{self.xst}"
                f" b{self.minb}{'' if self.early == 1 else f' e{self.early}'}{'' if self.xt else ' 1d'}{f' DIAG{self.diag}' if self.diag else ''}{' blk' if self.mode else ''}")

    def cubin(self):
        digest = hashlib.sha256(SOURCES[self.src].read_bytes() + " ".join(self.flags()).encode()).hexdigest()[:16]
        return HERE / "cubin" / f"{digest}.cubin"


ARCH = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"]


def build_with_nvcc(config):
    path = config.cubin()
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        return ""
    done = subprocess.run(["nvcc", *ARCH, "-cubin", "-Xptxas", "-v", "-o", str(path), str(SOURCES[config.src]), *config.flags()],
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr + done.stdout)
    return done.stderr


# --- NVRTC

def _nvrtc():
    places = ["libnvrtc.so.13", *glob.glob("/usr/local/cuda*/lib64/libnvrtc.so*")]
    try:
        import torch
        root = Path(torch.__file__).parent.parent
        places += [str(p) for p in root.glob("nvidia/**/libnvrtc.so.1[23]")]
    except ImportError:
        pass
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


_NVRTC, _LOCK = None, threading.Lock()


def compile_with_nvrtc(config):
    global _NVRTC
    with _LOCK:
        if _NVRTC is None:
            _NVRTC = _nvrtc()
    lib = _NVRTC
    if lib is None:
        raise RuntimeError("no NVRTC")
    program = c_void_p()
    assert lib.nvrtcCreateProgram(byref(program), c_char_p(SOURCES[config.src].read_bytes()), b"few.cu", 0, None, None) == 0
    flags = [f.encode() for f in ["--gpu-architecture=sm_90a", "--std=c++17", *config.flags()]]
    rc = lib.nvrtcCompileProgram(program, len(flags), (c_char_p * len(flags))(*flags))
    if rc:
        size = c_size_t()
        lib.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode()[:1500])
    size = c_size_t()
    assert lib.nvrtcGetCUBINSize(program, byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert lib.nvrtcGetCUBIN(program, image) == 0
    return image.raw


# --- driver

class _Value(Union):
    _fields_ = [("pad", c_char * 64), ("cluster", c_uint * 3), ("number", c_int)]


class _Attribute(Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", _Value)]


class _LaunchConfig(Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("smem", c_uint), ("stream", c_void_p),
                ("attributes", POINTER(_Attribute)), ("count", c_uint)]


_CUDA = None


def cuda():
    global _CUDA
    if _CUDA is None:
        _CUDA = ctypes.CDLL("libcuda.so.1")
    return _CUDA


def ok(rc, what=""):
    if rc:
        name = c_char_p()
        cuda().cuGetErrorString(rc, byref(name))
        raise RuntimeError(f"{what}: {rc} {name.value}")


def tensor_map(address, rows, columns, box_rows, swizzle=3):
    """Of bytes [rows][columns], boxes of [box_rows][128], 128-byte swizzle."""
    raw = ctypes.create_string_buffer(128 + 64)
    at = (addressof(raw) + 63) // 64 * 64
    ok(cuda().cuTensorMapEncodeTiled(
        c_void_p(at), c_int(0), c_uint32(2), c_void_p(address), (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(columns),
        (c_uint32 * 2)(128, box_rows), (c_uint32 * 2)(1, 1), c_int(0), c_int(swizzle), c_int(3), c_int(0)), "tensor map")
    return raw, at


class Launch:
    """A kernel with its arguments, which can be launched again and again on any stream."""

    def __init__(self, function, grid, threads, smem, arguments, cluster=1, early=False):
        self.function, self.kept = function, arguments
        attributes = (_Attribute * 2)()
        count = 0
        if cluster > 1:
            attributes[count].id = 4
            attributes[count].value.cluster[:] = [cluster, 1, 1]
            count += 1
        if early:
            attributes[count].id = 6
            attributes[count].value.number = 1
            count += 1
        self.attributes = attributes
        self.config = _LaunchConfig((c_uint * 3)(grid, 1, 1), (c_uint * 3)(threads, 1, 1), smem, None, attributes, count)
        addresses = [a if isinstance(a, int) else addressof(a) for a in arguments["params"]]
        self.params = (c_void_p * len(addresses))(*addresses)

    def __call__(self, stream):
        self.config.stream = stream
        rc = cuda().cuLaunchKernelEx(byref(self.config), self.function, self.params, None)
        if rc:
            ok(rc, "launch")


class Kernel:
    def __init__(self, config, image):
        self.config, self.space = config, {}
        module, self.function, self.prepare = c_void_p(), c_void_p(), c_void_p()
        ok(cuda().cuModuleLoadData(byref(module), image), "load")
        ok(cuda().cuModuleGetFunction(byref(self.function), module, b"few_product"), "product")
        ok(cuda().cuModuleGetFunction(byref(self.prepare), module, b"few_lay_out"), "lay out")
        ok(cuda().cuFuncSetAttribute(self.function, 8, config.smem), "smem")
        if config.cn * config.ck > 8:
            ok(cuda().cuFuncSetAttribute(self.function, 14, 1), "cluster")

    def attributes(self):
        """Registers and bytes of local memory."""
        found = []
        for which in (4, 3):
            value = c_int()
            ok(cuda().cuFuncGetAttribute(byref(value), which, self.function))
            found.append(value.value)
        return found

    def most_clusters(self):
        c = self.config
        launch = Launch(self.function, c.cn * c.ck * 132, c.threads, c.smem, {"params": []}, c.cn * c.ck)
        count = c_int()
        ok(cuda().cuOccupancyMaxActiveClusters(byref(count), self.function, byref(launch.config)), "occupancy")
        return count.value

    def product(self, w, scales, x, factors, y, m, residual=None, early=False, where=None):
        """x, factors: laid out. All tensors on the GPU."""
        c, (n, k) = self.config, w.shape
        features = n // (1 + c.gated)
        assert k % 128 == 0
        tiles = -(-features // c.hr)
        tiles += -tiles % c.cn
        boxes = tensor_map(w.data_ptr(), n, k, c.hr)
        boxes_x = tensor_map(x.data_ptr(), k // 64 * c.tok, 128, 2 * c.tok // c.cn, swizzle=0)
        pointer = lambda t: c_void_p(0 if t is None else t.data_ptr())
        params = [boxes[1], boxes_x[1], pointer(x), pointer(factors), pointer(scales), pointer(residual), pointer(y),
                  c_int(m), c_int(n), c_int(k // 128), pointer(where)]
        beside = ()
        if c.src == 2:
            if c.gp > 1 and (tiles, c) not in self.space:  # one for all launches, which come one after the other
                import torch
                self.space[tiles, c] = (torch.empty(tiles * c.gp * c.tok * c.rows, device="cuda"),
                                        torch.zeros(tiles, device="cuda", dtype=torch.int32))
            beside = self.space.get((tiles, c), (None, None))
            params += [pointer(each) for each in beside]
        kept = {"params": params, "rest": (boxes, boxes_x, w, scales, x, factors, y, residual, where, beside)}
        return Launch(self.function, tiles * c.ck * c.gp, c.threads, c.smem, kept, c.cn * c.ck, early)

    def lay_out(self, x, out, factors, early=False):
        m, k = x.shape
        params = [c_void_p(t.data_ptr()) for t in (x, out, factors)] + [c_int(m), c_int(k)]
        return Launch(self.prepare, self.config.tok, 512, 2 * k, {"params": params, "rest": (x, out, factors)}, 1, early)
