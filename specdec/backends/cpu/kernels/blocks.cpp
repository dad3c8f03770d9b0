// Opens the block formats of GGUF. Reference: specdec/checkpoints/gguf/blocks.py, which has the sources.

#include "packed.h"

namespace specdec {

static float half(const uint8_t* from) {  // not for infinities and NaN
    const int32_t up = load_as<uint16_t>(from) << 16, wide = (up >> 3) & (int32_t)0x8fffe000;
    return load_as<float>(&wide) * 0x1p112f;
}

// `count` codes of four bits: the low ones of every `width` / 2 bytes, a multiple of 16, come first.
static void nibbles(const uint8_t* from, int width, int count, uint8_t* codes) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    for (const uint8_t* end = codes + count; codes < end; codes += width, from += width / 2)
        for (int i = 0; i < width / 2; i += 16) {
            const Bytes both = load_as<Bytes>(from + i), low = both & 15, high = both >> 4;
            std::memcpy(codes + i, &low, 16);
            std::memcpy(codes + i + width / 2, &high, 16);
        }
}

// Bit i of four bytes is 16 of code i.
static void fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 4; ++i) {
        const uint64_t own = from[i] * 0x0101010101010101u & 0x8040201008040201u;  // bit j in byte j
        const uint64_t high = ((own + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        const uint64_t eight = load_as<uint64_t>(codes + 8 * i) | high;
        std::memcpy(codes + 8 * i, &eight, 8);
    }
}

// Adds two bits to each of 256 codes, of whose halves of 128 each 32 bytes hold four in turn.
static void two_bits(const uint8_t* from, int shift, uint8_t* codes) {
    for (int i = 0; i < 256; i += 32)
        for (int j = 0; j < 32; ++j) codes[i + j] |= (from[i / 128 * 32 + j] >> i / 32 % 4 * 2 & 3) << shift;
}

// Bit i / 32 of byte i % 32 belongs to code i of 256.
static void one_bit(const uint8_t* from, int shift, uint8_t* codes) {
    for (int i = 0; i < 256; i += 32)
        for (int j = 0; j < 32; ++j) codes[i + j] |= (from[j] >> i / 32 & 1) << shift;
}

// The scales and minima of six bits of Q4_K and Q5_K.
static void k_scales(const uint8_t* from, Block& to) {
    to.sides[0] = half(from);
    to.sides[1] = -half(from + 2);
    const uint8_t *low = from + 4, *middle = from + 8, *high = from + 12;
    for (int i = 0; i < 4; ++i) {
        to.small[0][i] = low[i] & 63;
        to.small[1][i] = middle[i] & 63;
        to.small[0][i + 4] = (int8_t)((high[i] & 15) | low[i] >> 6 << 4);
        to.small[1][i + 4] = (int8_t)(high[i] >> 4 | middle[i] >> 6 << 4);
    }
}

void open_block(int64_t type, const uint8_t* from, Block& to) {
    uint8_t* codes = to.codes;
    switch (type) {
    case 2:   // Q4_0
    case 20:  // IQ4_NL
        to.sides[0] = half(from);
        return nibbles(from + 2, 32, 32, codes);
    case 3:  // Q4_1
        to.sides[0] = half(from);
        to.sides[1] = half(from + 2);
        return nibbles(from + 4, 32, 32, codes);
    case 6:  // Q5_0
        to.sides[0] = half(from);
        nibbles(from + 6, 32, 32, codes);
        return fifth_bits(from + 2, codes);
    case 7:  // Q5_1
        to.sides[0] = half(from);
        to.sides[1] = half(from + 2);
        nibbles(from + 8, 32, 32, codes);
        return fifth_bits(from + 4, codes);
    case 8:  // Q8_0
        to.sides[0] = half(from);
        std::memcpy(codes, from + 2, 32);
        return;
    case 10:  // Q2_K
        std::memset(codes, 0, 256);
        two_bits(from + 16, 0, codes);
        to.sides[0] = half(from + 80);
        to.sides[1] = -half(from + 82);
        for (int i = 0; i < 16; ++i) {
            to.small[0][i] = from[i] & 15;
            to.small[1][i] = from[i] >> 4;
        }
        return;
    case 11:  // Q3_K
        std::memset(codes, 0, 256);
        two_bits(from + 32, 0, codes);
        one_bit(from, 2, codes);
        to.sides[0] = half(from + 108);
        for (int i = 0; i < 16; ++i) {
            const int low = from[96 + i % 8] >> i / 8 * 4 & 15, high = from[104 + i % 4] >> i / 4 * 2 & 3;
            to.small[0][i] = (int8_t)((low | high << 4) - 32);
        }
        return;
    case 12:  // Q4_K
        k_scales(from, to);
        return nibbles(from + 16, 64, 256, codes);
    case 13:  // Q5_K
        k_scales(from, to);
        nibbles(from + 48, 64, 256, codes);
        return one_bit(from + 16, 4, codes);
    case 14:  // Q6_K
        nibbles(from, 128, 256, codes);
        two_bits(from + 128, 4, codes);
        std::memcpy(to.small[0], from + 192, 16);
        to.sides[0] = half(from + 208);
        return;
    case 23:  // IQ4_XS
        to.sides[0] = half(from);
        nibbles(from + 8, 32, 256, codes);
        for (int i = 0; i < 8; ++i) {
            const int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = from[2 + i / 4] >> i % 4 * 2 & 3;
            to.small[0][i] = (int8_t)((low | high << 4) - 32);
        }
        return;
    case 39: {  // MXFP4: a power of two
        const uint32_t bits = from[0] ? from[0] << 23 : 1 << 22;
        std::memcpy(to.sides, &bits, 4);
        return nibbles(from + 1, 32, 32, codes);
    }
    }
}

}  // namespace specdec
