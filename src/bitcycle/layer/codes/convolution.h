// Convolution of codes: sums of products of 8-bit integers with AVX-512 VNNI instructions, single-threaded.
//
//     y[p, o] = s_x s_o sum n[p + k, c] m[o, k, c] + (s_x z_o sum n[p + k, c] + rest[p, o])
//
// One instruction multiplies 4 input channels of a pixel by the weights of 16 output channels.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace bitcycle {

struct Shape {
    int64_t images, height, width, channels, out_height, out_width, out_channels, kernel, stride, padding;

    int64_t x_size() const { return height * width * channels; }
    int64_t places() const { return out_height * out_width; }
};

constexpr int64_t LANES = 16;  // output channels per instruction

// Weights m [O, K, K, C] as [O / 16, K K C / 4, 16, 4]
inline std::vector<int8_t> packed_weight(const int8_t* m, const Shape& s) {
    const int64_t terms = s.kernel * s.kernel * s.channels;
    std::vector<int8_t> packed(s.out_channels * terms);
    for (int64_t o = 0; o < s.out_channels; o++)
        for (int64_t i = 0; i < terms; i += 4)
            std::memcpy(&packed[(o / LANES * terms + i) * LANES + o % LANES * 4], m + o * terms + i, 4);
    return packed;
}

struct Epilogue {
    const float *scales, *offsets;  // s_x s_o and s_x z_o, [O]
    const float* rest;              // [H', W', O], or [O] if `rest_step` is 0
    int64_t rest_step;
};

// Convolves one image at a time
class Convolution {
    Shape s;
    const int8_t* weight;
    Epilogue epilogue;
    int64_t wide, high;              // width and height of a padded image
    std::vector<uint8_t> padded;     // [high, wide, C], 0 around the image
    std::vector<int32_t> sums, columns, windows;  // sums of codes: per padded pixel, per column of a row, per window

    // P adjacent positions of an output row, B blocks of 16 output channels
    template <int P, int B>
    void places(int64_t row, int64_t column, int64_t block, float* y) const {
        const int64_t taps = s.channels / 4, of_block = s.kernel * s.kernel * s.channels * LANES;
        const int8_t* m = weight + block * of_block;
        __m512i sum[P][B];
        for (int p = 0; p < P; p++)
            for (int b = 0; b < B; b++) sum[p][b] = _mm512_setzero_si512();
        for (int64_t i = 0; i < s.kernel; i++)
            for (int64_t j = 0; j < s.kernel; j++) {
                const uint8_t* x = &padded[((row * s.stride + i) * wide + column * s.stride + j) * s.channels];
                for (int64_t tap = 0; tap < taps; tap++, m += 64) {
                    __m512i four[B];
                    for (int b = 0; b < B; b++) four[b] = _mm512_loadu_si512(m + b * of_block);
                    for (int p = 0; p < P; p++) {
                        int32_t codes;
                        std::memcpy(&codes, x + p * s.stride * s.channels + tap * 4, 4);
                        const __m512i pixel = _mm512_set1_epi32(codes);
                        for (int b = 0; b < B; b++) sum[p][b] = _mm512_dpbusd_epi32(sum[p][b], pixel, four[b]);
                    }
                }
            }
        for (int b = 0; b < B; b++) {
            const int64_t first = (block + b) * LANES;
            const __m512 scale = _mm512_loadu_ps(epilogue.scales + first), offset = _mm512_loadu_ps(epilogue.offsets + first);
            for (int p = 0; p < P; p++) {
                const int64_t place = row * s.out_width + column + p;
                const __m512 rest = _mm512_loadu_ps(epilogue.rest + place * epilogue.rest_step + first);
                const __m512 window = _mm512_set1_ps(static_cast<float>(windows[column + p]));
                const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[p][b]), scale);
                const __m512 added = _mm512_add_ps(_mm512_mul_ps(offset, window), rest);
                _mm512_storeu_ps(y + place * s.out_channels + first, _mm512_add_ps(product, added));
            }
        }
    }

    template <int B>
    void blocks(int64_t row, int64_t block, float* y) const {
        int64_t column = 0;
        for (; column + 16 / B <= s.out_width; column += 16 / B) places<16 / B, B>(row, column, block, y);
        for (; column + 4 <= s.out_width; column += 4) places<4, B>(row, column, block, y);
        for (; column < s.out_width; column++) places<1, B>(row, column, block, y);
    }

    // Sums of codes in the windows of an output row: first over columns, then over the window's columns
    void sum_windows(int64_t row) {
        const int32_t* from = &sums[row * s.stride * wide];
        for (int64_t column = 0; column < wide; column++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < s.kernel; i++) sum += from[i * wide + column];
            columns[column] = sum;
        }
        for (int64_t column = 0; column < s.out_width; column++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < s.kernel; j++) sum += columns[column * s.stride + j];
            windows[column] = sum;
        }
    }

   public:
    Convolution(const Shape& shape, const int8_t* weight, const Epilogue& epilogue)
        : s(shape), weight(weight), epilogue(epilogue), wide(s.width + 2 * s.padding), high(s.height + 2 * s.padding),
          padded(wide * high * s.channels), sums(wide * high), columns(wide), windows(s.out_width) {}

    // codes n [H, W, C] -> y [H', W', O]
    void image(const uint8_t* n, float* y) {
        for (int64_t row = 0; row < s.height; row++)
            std::memcpy(&padded[((row + s.padding) * wide + s.padding) * s.channels], n + row * s.width * s.channels, s.width * s.channels);
        const __m128i one = _mm_set1_epi8(1);
        for (int64_t pixel = 0; pixel < wide * high; pixel++) {
            __m128i sum = _mm_setzero_si128();
            for (int64_t c = 0; c < s.channels; c += 16)
                sum = _mm_dpbusd_epi32(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(&padded[pixel * s.channels + c])), one);
            sum = _mm_add_epi32(sum, _mm_srli_si128(sum, 8));
            sums[pixel] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_srli_si128(sum, 4)));
        }
        const int64_t all = s.out_channels / LANES;
        for (int64_t row = 0; row < s.out_height; row++) {
            sum_windows(row);
            int64_t block = 0;
            for (; block + 2 <= all; block += 2) blocks<2>(row, block, y);
            for (; block < all; block++) blocks<1>(row, block, y);
        }
    }
};

}  // namespace bitcycle
