"""Decoding inside the product: every code of every format, by the interpreter's arithmetic and by the device's PTX."""

import re

import numpy as np
import pytest
import torch

from specdec.backends.cuda import weights
from specdec.backends.cuda.kernels import packed
from specdec.backends.cuda.weights import Fp8BlockWeight, Nvfp4Weight
from specdec.errors import ShapeError, UnsupportedError

pytestmark = pytest.mark.interpreter

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


# --- the device's PTX, run by hand ------------------------------------------------------------------------------------


def _bfloat16_pairs(x):
    halves = np.stack([x & 0xFFFF, x >> 16], axis=-1).astype(np.uint32) << 16
    return halves.view(np.float32)


def run_ptx(source, inputs):
    """Run the few instructions that the decoders use, as the PTX ISA (8.8, section 9.7) defines them, on uint32."""
    registers = dict(inputs)

    def value(word):
        return registers[word] if word in registers else np.uint32(int(word, 0))

    for line in re.findall(r"([a-z][\w.]*) ([^;]+);", source):
        name, words = line[0], [word.strip() for word in line[1].split(",")]
        if name == "reg":
            continue
        to, args = words[0], [value(word) for word in words[1:]]
        match name:
            case "mov.b32":
                registers[to] = args[0]
            case "and.b32":
                registers[to] = args[0] & args[1]
            case "shr.b32":
                registers[to] = args[0] >> args[1]
            case "shl.b32":
                registers[to] = (args[0].astype(np.uint64) << np.uint64(args[1])).astype(np.uint32)
            case "prmt.b32":
                both = args[0].astype(np.uint64) | np.uint64(int(args[1]) << 32)
                out = np.zeros_like(args[0])
                for i in range(4):
                    picked = (int(args[2]) >> (4 * i)) & 0xF
                    assert picked < 8, "sign replication is not used"
                    byte = (both >> np.uint64(8 * picked)).astype(np.uint32) & np.uint32(0xFF)
                    out |= byte << np.uint32(8 * i)
                registers[to] = out
            case "lop3.b32":
                assert int(words[4], 0) == 0xEA
                registers[to] = (args[0] & args[1]) | args[2]
            case "fma.rn.bf16x2":
                a, b, c = (_bfloat16_pairs(np.broadcast_to(arg, args[0].shape).astype(np.uint32)) for arg in args)
                exact = a.astype(np.float64) * b + c
                bits = exact.astype(np.float32).view(np.uint32)
                assert not (bits & 0xFFFF).any(), "every product is exact in bfloat16"
                registers[to] = (bits[..., 0] >> 16) | bits[..., 1]
            case _:
                raise AssertionError(f"instruction {name}")
    return registers


def _lines(source):
    return source.replace(".reg", "reg").replace("{", "").replace("}", "")


def _packed_bytes():
    return torch.cat([CODES, CODES.flip(0)]).numpy().view(np.uint32)


def test_the_ptx_of_e4m3():
    words = _packed_bytes()
    found = run_ptx(_lines(packed.E4M3.value), {"$2": words})
    values = np.stack([_bfloat16_pairs(found["$0"]), _bfloat16_pairs(found["$1"])], axis=1).reshape(-1)
    codes = torch.from_numpy(words.view(np.uint8).copy())
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    finite = ((codes & 127) != 127).numpy()
    assert np.array_equal(values[finite], expected[finite])
    assert np.array_equal(np.signbit(values), np.signbit(expected))


def test_the_ptx_of_e2m1_and_of_its_scale():
    words = _packed_bytes()
    found = run_ptx(_lines(packed.E2M1.value), {"$4": words})
    codes = words.view(np.uint8)
    table = np.array(weights._E2M1, dtype=np.float32)
    for registers, halves in ((("$0", "$1"), codes & 15), (("$2", "$3"), codes >> 4)):
        values = np.stack([_bfloat16_pairs(found[name]) for name in registers], axis=1).reshape(-1)
        assert np.array_equal(values.astype(np.float64) * 2.0**126, table[halves])
        for scale in (2.0**-9, 0.4375, 13.0, 448.0):  # an E4M3 number times 2^119, in bfloat16
            factor = np.uint32(np.float32(scale * 2.0**119).view(np.uint32) >> 16) * np.uint32(0x10001)
            for name in registers:
                times = run_ptx(_lines(packed.TIMES.value), {"$1": found[name], "$2": factor})["$0"]
                expected = _bfloat16_pairs(found[name]).astype(np.float64) * 2.0**126 * scale * 2.0**-7
                assert np.array_equal(_bfloat16_pairs(times), expected)


# --- holders ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample
def test_what_holders_refuse():
    with pytest.raises(ShapeError, match="multiple of 16"):
        Nvfp4Weight(torch.zeros(4, 5, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), torch.ones(1))
    with pytest.raises(UnsupportedError, match="one scale per 24 columns"):
        packed.Layout.of(Fp8BlockWeight(torch.zeros(4, 48, dtype=torch.uint8), torch.ones(1, 2), (4, 24)))
