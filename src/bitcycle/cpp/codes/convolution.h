// Convolution of codes: sums of products of 8-bit integers with AVX-512 VNNI instructions, single-threaded.
//
// One instruction multiplies 4 input channels of a pixel by the weights of 16 output channels. An epilogue turns the sums
// of a row of pixels into their output: `Decoding` here, `FixedPoint` in input_gradient.h.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace bitcycle {

struct Shape {
    int64_t images, height, width, channels, out_height, out_width, out_channels, kernel, stride, padding;

    int64_t x_size() const { return height * width * channels; }
    int64_t places() const { return out_height * out_width; }
    int64_t wide() const { return width + 2 * padding; }  // of a padded image
    int64_t high() const { return height + 2 * padding; }
};

constexpr int64_t LANES = 16;  // output channels per instruction

#define UNROLL _Pragma("GCC unroll 16")  // so that arrays of registers stay registers

// sum += products of 4 unsigned codes with 4 signed ones; around the intrinsic function GCC 12 copies every register
[[gnu::always_inline]] inline void add_products(__m512i& sum, __m512i x, __m512i weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
}

// Weights m [O, K, K, C] as [O / 16, K K C / 4, 16, 4]
inline std::vector<int8_t> packed_weight(const int8_t* m, const Shape& s) {
    const int64_t terms = s.kernel * s.kernel * s.channels;
    std::vector<int8_t> packed(s.out_channels * terms);
    for (int64_t o = 0; o < s.out_channels; o++)
        for (int64_t i = 0; i < terms; i += 4)
            std::memcpy(&packed[(o / LANES * terms + i) * LANES + o % LANES * 4], m + o * terms + i, 4);
    return packed;
}

//     y[p, o] = s_x s_o sum n[p + k, c] m[o, k, c] + (s_x z_o sum n[p + k, c] + rest[p, o])
class Decoding {
    Shape s;
    const float *scales, *offsets;  // s_x s_o and s_x z_o, [O]
    const float* rest;              // [H', W', O], or [O] if `rest_step` is 0
    int64_t rest_step;
    std::vector<int32_t> sums, columns;  // of codes: per padded pixel, per column of a row
    std::vector<float> windows;

   public:
    static constexpr uint8_t OUTSIDE = 0;

    Decoding(const Shape& s, const float* scales, const float* offsets, const float* rest, int64_t rest_step)
        : s(s), scales(scales), offsets(offsets), rest(rest), rest_step(rest_step), sums(s.wide() * s.high()), columns(s.wide()), windows(s.out_width) {}

    void begin_image(const uint8_t* padded) {
        const __m128i one = _mm_set1_epi8(1);
        for (int64_t pixel = 0; pixel < s.wide() * s.high(); pixel++) {
            __m128i sum = _mm_setzero_si128();
            for (int64_t c = 0; c < s.channels; c += 16)
                sum = _mm_dpbusd_epi32(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(&padded[pixel * s.channels + c])), one);
            sum = _mm_add_epi32(sum, _mm_srli_si128(sum, 8));
            sums[pixel] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_srli_si128(sum, 4)));
        }
    }

    // Sums of codes in the windows of an output row: first over columns, then over the window's columns
    template <int64_t K>
    void sum_windows(const int32_t* __restrict from, int32_t* __restrict column, float* __restrict window) const {
        const int64_t wide = s.wide(), stride = s.stride, count = s.out_width, kernel = K ? K : s.kernel;
        for (int64_t j = 0; j < wide; j++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < kernel; i++) sum += from[i * wide + j];
            column[j] = sum;
        }
        for (int64_t j = 0; j < count; j++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < kernel; i++) sum += column[j * stride + i];
            window[j] = static_cast<float>(sum);
        }
    }

    void begin_row(int64_t row) {
        const int32_t* from = &sums[row * s.stride * s.wide()];
        s.kernel == 3 ? sum_windows<3>(from, columns.data(), windows.data()) : sum_windows<0>(from, columns.data(), windows.data());
    }

    __m512i start(int64_t) const { return _mm512_setzero_si512(); }

    template <int P, int B>
    [[gnu::always_inline]] void store(const __m512i (&sum)[P][B], int64_t row, int64_t column, int64_t block, float* y) const {
        UNROLL for (int b = 0; b < B; b++) {
            const int64_t first = (block + b) * LANES;
            const __m512 scale = _mm512_loadu_ps(scales + first), offset = _mm512_loadu_ps(offsets + first);
            UNROLL for (int p = 0; p < P; p++) {
                const int64_t place = row * s.out_width + column + p;
                const __m512 window = _mm512_set1_ps(windows[column + p]);
                const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[p][b]), scale);
                const __m512 added = _mm512_add_ps(_mm512_mul_ps(offset, window), _mm512_loadu_ps(rest + place * rest_step + first));
                _mm512_storeu_ps(y + place * s.out_channels + first, _mm512_add_ps(product, added));
            }
        }
    }
};

// Convolves one image at a time
template <class Epilogue>
class Convolution {
    Shape s;
    const int8_t* weight;
    Epilogue epilogue;
    std::vector<int32_t> offsets;  // of 4 codes from the window's corner, per instruction
    std::vector<uint8_t> padded;   // [high, wide, C], Epilogue::OUTSIDE around the image

    // P adjacent positions of an output row, B blocks of 16 output channels; inlined, sums would not stay in registers
    template <int P, int B>
    [[gnu::noinline]] void places(int64_t row, int64_t column, int64_t block, float* y) const {
        const int64_t of_block = offsets.size() * 64, step = s.stride * s.channels;
        const int8_t* m = weight + block * of_block;
        const uint8_t* corner = &padded[(row * s.wide() + column) * s.stride * s.channels];
        __m512i sum[P][B];
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int b = 0; b < B; b++) sum[p][b] = epilogue.start(block + b);
        for (const int32_t offset : offsets) {
            __m512i four[B];
            UNROLL for (int b = 0; b < B; b++) four[b] = _mm512_loadu_si512(m + b * of_block);
            UNROLL for (int p = 0; p < P; p++) {
                int32_t codes;
                std::memcpy(&codes, corner + p * step + offset, 4);
                const __m512i pixel = _mm512_set1_epi32(codes);
                UNROLL for (int b = 0; b < B; b++) add_products(sum[p][b], pixel, four[b]);
            }
            m += 64;
        }
        epilogue.template store<P, B>(sum, row, column, block, y);
    }

    template <int B>
    void blocks(int64_t row, int64_t block, float* y) const {
        int64_t column = 0;
        for (; column + 16 / B <= s.out_width; column += 16 / B) places<16 / B, B>(row, column, block, y);
        for (; column + 4 <= s.out_width; column += 4) places<4, B>(row, column, block, y);
        for (; column < s.out_width; column++) places<1, B>(row, column, block, y);
    }

   public:
    Convolution(const Shape& shape, const int8_t* weight, const Epilogue& epilogue)
        : s(shape), weight(weight), epilogue(epilogue), padded(s.wide() * s.high() * s.channels, Epilogue::OUTSIDE) {
        for (int64_t tap = 0; tap < s.kernel * s.kernel; tap++)
            for (int64_t c = 0; c < s.channels; c += 4)
                offsets.push_back((tap / s.kernel * s.wide() + tap % s.kernel) * s.channels + c);
    }

    // codes n [H, W, C] -> y [H', W', O]
    void image(const uint8_t* n, float* y) {
        for (int64_t row = 0; row < s.height; row++) {
            const uint8_t* from = n + row * s.width * s.channels;
            uint8_t* to = &padded[((row + s.padding) * s.wide() + s.padding) * s.channels];
            std::transform(from, from + s.width * s.channels, to, [](uint8_t code) { return code ^ Epilogue::OUTSIDE; });
        }
        epilogue.begin_image(padded.data());
        const int64_t all = s.out_channels / LANES;
        for (int64_t row = 0; row < s.out_height; row++) {
            epilogue.begin_row(row);
            int64_t block = 0;
            for (; block + 2 <= all; block += 2) blocks<2>(row, block, y);
            for (; block < all; block++) blocks<1>(row, block, y);
        }
    }
};

}  // namespace bitcycle
