// Weight gradient of a convolution as integer sums with 8-bit AVX-512 VNNI instructions.
//
//     dW[o, k, c] = sum over images and output pixels p of  G[p, o] X[p + k, c],    X = x_scale x + x_zero inside the image,
//                                                                                   G = g_scale g + g_zero
//
// equals x_scale (g_scale sum g x + g_zero sum x) + x_zero (g_scale sum g + g_zero sum 1),  with all four sums over the
// pixels p for which p + k is inside the image. Codes x are 0 ... 255, g are -128 ... 127; sums are exact and
// independent of the number of threads. One instruction multiplies 4 pixels of 16 input channels by 4 pixels of an
// output channel; both are first copied to a suitable layout, a few images at a time, so that they stay in the cache.

#pragma once

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "convolution.h"

namespace bitcycle {

constexpr int64_t PIXELS = 4;          // per instruction, of 16 input channels
constexpr int64_t MOST_TERMS = 65000;  // terms of a 32-bit sum of products: 255 * 128 * 65,000 < 2^31
constexpr int64_t CACHED = 1 << 16;    // bytes of codes copied at a time (at least one image)

struct Steps {
    double x_scale, x_zero, g_scale, g_zero;
};

// 16 channels of 4 pixels, `step` bytes apart, as 16 groups of 4 bytes
inline __m512i four_pixels(const uint8_t* from, int64_t step) {
    const auto load = [&](int64_t pixel) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + pixel * step)); };
    __m512i four = _mm512_inserti32x4(_mm512_castsi128_si512(load(0)), load(1), 1);
    four = _mm512_inserti32x4(_mm512_inserti32x4(four, load(2), 2), load(3), 3);
    const __m512i by_channel = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // 4 channels of 4 pixels
    const __m512i transposed = _mm512_set4_epi32(0x0F0B0703, 0x0E0A0602, 0x0D090501, 0x0C080400);
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(by_channel, four), transposed);
}

template <class From, class To>
void accumulate(const From* __restrict from, int64_t count, To* __restrict to) {
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

// Sums over a range of images
template <int K>
class Sums {
    static constexpr int64_t TILE = K == 1 ? 16 : 8;  // output channels with sums in registers

    Shape s;
    int64_t groups, rows, input_blocks, output_tiles;         // 4-pixel groups per row, padded rows, channel blocks
    int64_t x_tap, x_row, x_image, x_block = 0;               // strides in bytes of the input's layout
    int64_t g_row, g_channel, g_image;                        // strides in bytes of the gradient's layout
    std::vector<uint8_t> x_layout, x_line, g_line;
    std::vector<int8_t> g_layout;
    std::vector<int64_t> offsets;  // of a group of an image in the input's layout
    std::vector<int32_t> narrow;
    std::vector<int64_t> wide;
    int64_t terms = 0;

    int64_t place(int64_t block, int64_t tile, int64_t row) const {
        return ((block * output_tiles + tile) * K + row) * TILE * K * LANES;
    }

    void widen() {
        wide.resize(narrow.size(), 0);
        accumulate(narrow.data(), narrow.size(), wide.data());
        std::fill(narrow.begin(), narrow.end(), 0);
        terms = 0;
    }

    // [height, width, channels] -> [channels / 16, padded rows, kernel columns, width / 4, 16, 4], zero outside the
    // image
    void lay_out_input(const uint8_t* x, uint8_t* to) {
        for (int64_t row = 0; row < rows; row++) {
            const int64_t from = row - s.padding;
            const bool outside = from < 0 || from >= s.height;
            if (!outside) std::memcpy(&x_line[s.padding * s.channels], x + from * s.width * s.channels, s.width * s.channels);
            for (int64_t block = 0; block < input_blocks; block++) {
                uint8_t* target = to + block * x_block + row * x_row;
                if (outside) {
                    std::memset(target, 0, x_row);
                    continue;
                }
                for (int64_t tap = 0; tap < K; tap++)
                    for (int64_t group = 0; group < groups; group++) {
                        const int64_t pixel = group * PIXELS * s.stride + tap;
                        const __m512i four = four_pixels(&x_line[pixel * s.channels + block * LANES], s.stride * s.channels);
                        _mm512_storeu_si512(target + tap * x_tap + group * LANES * PIXELS, four);
                    }
            }
        }
    }

    // [height, width, channels] -> [channels, height, width], rows padded with zeros to multiples of 4
    void lay_out_gradient(const int8_t* g, int8_t* to) {
        for (int64_t row = 0; row < s.out_height; row++) {
            std::memcpy(g_line.data(), g + row * s.out_width * s.out_channels, s.out_width * s.out_channels);
            for (int64_t channel = 0; channel < s.out_channels; channel += LANES)
                for (int64_t group = 0; group < groups; group++) {
                    alignas(64) int32_t four[LANES];
                    _mm512_store_si512(four, four_pixels(&g_line[group * PIXELS * s.out_channels + channel], s.out_channels));
                    for (int64_t lane = 0; lane < LANES; lane++)
                        std::memcpy(to + (channel + lane) * g_channel + row * g_row + group * PIXELS, &four[lane], PIXELS);
                }
        }
    }

    // For a tile of output channels, 16 input channels, and one row of the kernel
    void multiply(const uint8_t* x, const int8_t* g, int64_t images, int32_t* sums) const {
        __m512i sum[TILE][K];
        UNROLL for (int64_t o = 0; o < TILE; o++)
            UNROLL for (int64_t k = 0; k < K; k++) sum[o][k] = _mm512_loadu_si512(sums + (o * K + k) * LANES);
        for (int64_t image = 0; image < images; image++, x += x_image, g += g_image)
            for (size_t group = 0; group < offsets.size(); group++) {
                __m512i taps[K];
                UNROLL for (int64_t k = 0; k < K; k++) taps[k] = _mm512_loadu_si512(x + offsets[group] + k * x_tap);
                UNROLL for (int64_t o = 0; o < TILE; o++) {
                    int32_t four;
                    std::memcpy(&four, g + o * g_channel + group * PIXELS, PIXELS);
                    const __m512i gradient = _mm512_set1_epi32(four);
                    UNROLL for (int64_t k = 0; k < K; k++) add_products(sum[o][k], taps[k], gradient);
                }
            }
        UNROLL for (int64_t o = 0; o < TILE; o++)
            UNROLL for (int64_t k = 0; k < K; k++) _mm512_storeu_si512(sums + (o * K + k) * LANES, sum[o][k]);
    }

   public:
    std::vector<int32_t> x_pixels, g_pixels;  // per pixel, summed over images

    explicit Sums(const Shape& shape) : s(shape) {
        groups = (s.out_width + PIXELS - 1) / PIXELS;
        rows = (s.out_height - 1) * s.stride + K;
        input_blocks = s.channels / LANES, output_tiles = s.out_channels / TILE;
        x_tap = groups * LANES * PIXELS, x_row = K * x_tap, x_image = rows * x_row;
        g_row = groups * PIXELS, g_channel = s.out_height * g_row, g_image = s.out_channels * g_channel;
        for (int64_t row = 0; row < s.out_height; row++)
            for (int64_t group = 0; group < groups; group++) offsets.push_back(row * s.stride * x_row + group * LANES * PIXELS);
    }

    void add(const uint8_t* x, const int8_t* g, int64_t images) {
        const int64_t x_size = s.height * s.width * s.channels, g_size = s.out_height * s.out_width * s.out_channels;
        const int64_t together = std::clamp<int64_t>(CACHED / (x_size + g_size), 1, std::max<int64_t>(images, 1));
        x_block = together * x_image;
        x_layout.resize(input_blocks * x_block), g_layout.resize(together * g_image);
        const int64_t read = (groups * PIXELS - 1) * s.stride + K;  // pixels read per row, possibly beyond its end
        x_line.assign(std::max(read, s.width + 2 * s.padding) * s.channels, 0);
        g_line.assign(groups * PIXELS * s.out_channels, 0);
        narrow.assign(input_blocks * output_tiles * K * TILE * K * LANES, 0);
        x_pixels.assign(x_size, 0), g_pixels.assign(g_size, 0);
        for (int64_t first = 0; first < images; first += together) {
            const int64_t count = std::min(together, images - first), more = count * s.out_height * s.out_width;
            if (terms + more > MOST_TERMS) widen();
            terms += more;
            for (int64_t image = 0; image < count; image++) {
                const uint8_t* x_here = x + (first + image) * x_size;
                const int8_t* g_here = g + (first + image) * g_size;
                accumulate(x_here, x_size, x_pixels.data());
                accumulate(g_here, g_size, g_pixels.data());
                lay_out_input(x_here, &x_layout[image * x_image]);
                lay_out_gradient(g_here, &g_layout[image * g_image]);
            }
            for (int64_t block = 0; block < input_blocks; block++)
                for (int64_t tile = 0; tile < output_tiles; tile++)
                    for (int64_t row = 0; row < K; row++)
                        multiply(&x_layout[block * x_block + row * x_row], &g_layout[tile * TILE * g_channel], count,
                                 &narrow[place(block, tile, row)]);
        }
    }

    // sum g x for 16 input channels, starting at `channel`
    void products(int64_t o, int64_t row, int64_t column, int64_t channel, int64_t* to) const {
        const int64_t at = place(channel / LANES, o / TILE, row) + ((o % TILE) * K + column) * LANES;
        accumulate(&narrow[at], LANES, to);
        if (!wide.empty()) accumulate(&wide[at], LANES, to);
    }
};

// sum x [K, K, channels], sum g [K, K, out_channels] and sum 1 [K, K], from sums over the images
template <int K>
void sum_windows(const Shape& s, const std::vector<int32_t>& x, const std::vector<int32_t>& g, std::vector<int64_t>& x_sums,
                 std::vector<int64_t>& g_sums, std::vector<int64_t>& counts) {
    x_sums.assign(K * K * s.channels, 0), g_sums.assign(K * K * s.out_channels, 0), counts.assign(K * K, 0);
    for (int64_t tap = 0; tap < K * K; tap++)
        for (int64_t i = 0; i < s.out_height; i++)
            for (int64_t j = 0; j < s.out_width; j++) {
                const int64_t row = i * s.stride + tap / K - s.padding, column = j * s.stride + tap % K - s.padding;
                if (row < 0 || row >= s.height || column < 0 || column >= s.width) continue;
                accumulate(&x[(row * s.width + column) * s.channels], s.channels, &x_sums[tap * s.channels]);
                accumulate(&g[(i * s.out_width + j) * s.out_channels], s.out_channels, &g_sums[tap * s.out_channels]);
                counts[tap] += s.images;
            }
}

template <int K>
void weight_gradient(const uint8_t* x, const int8_t* g, float* out, const Shape& s, const Steps& a, int64_t threads) {
    threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(s.images, 1));
    std::vector<Sums<K>> parts(threads, Sums<K>(s));
    const auto work = [&](int64_t thread) {
        const int64_t first = s.images * thread / threads, last = s.images * (thread + 1) / threads;
        parts[thread].add(x + first * s.height * s.width * s.channels,
                          g + first * s.out_height * s.out_width * s.out_channels, last - first);
    };
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
        for (int64_t thread = first; thread < last; thread++) work(thread);
    });

    auto &x_pixels = parts[0].x_pixels, &g_pixels = parts[0].g_pixels;
    for (int64_t thread = 1; thread < threads; thread++) {
        accumulate(parts[thread].x_pixels.data(), x_pixels.size(), x_pixels.data());
        accumulate(parts[thread].g_pixels.data(), g_pixels.size(), g_pixels.data());
    }
    std::vector<int64_t> x_sums, g_sums, counts;
    sum_windows<K>(s, x_pixels, g_pixels, x_sums, g_sums, counts);

    for (int64_t o = 0; o < s.out_channels; o++)
        for (int64_t tap = 0; tap < K * K; tap++)
            for (int64_t channel = 0; channel < s.channels; channel += LANES) {
                int64_t products[LANES] = {};
                for (const auto& part : parts) part.products(o, tap / K, tap % K, channel, products);
                const double rest = a.x_zero * (a.g_scale * g_sums[tap * s.out_channels + o] + a.g_zero * counts[tap]);
                const int64_t* x_sum = &x_sums[tap * s.channels + channel];
                float* to = out + (o * K * K + tap) * s.channels + channel;
                for (int64_t lane = 0; lane < LANES; lane++) {
                    const double sum = a.g_scale * products[lane] + a.g_zero * x_sum[lane];
                    to[lane] = static_cast<float>(a.x_scale * sum + rest);
                }
            }
}

}  // namespace bitcycle
