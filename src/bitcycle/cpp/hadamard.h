// Random Hadamard transform of tiles of `size` elements, as hadamard.py: y_j = sum_k m_kj x_k, added in the order of k, which is
// PyTorch's in products of matrices where hadamard.py finds that it is.
//
// In m = S H, column j + h is column j with the other sign from row h on, for a power of two h, and the same before it. So two
// sums continue one that is already there, and a third of the products is saved.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "affine.h"

namespace bitcycle {

#ifdef __AVX512F__
constexpr int64_t WIDTH = 16;
#else
constexpr int64_t WIDTH = 8;
#endif
typedef float Lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
struct Vectors { typedef Lanes Type; };  // as arguments of templates, which types with attributes cannot be
struct Elements { typedef float Type; };
constexpr int64_t TOGETHER = 4;  // vectors whose sums are in registers

struct Rotation {
    int64_t size;
    std::vector<float> matrix;  // [size, size]

    Rotation(int64_t size, uint32_t key) : size(size), matrix(size * size) {
        const float root = 1.0f / static_cast<float>(std::sqrt(static_cast<double>(size)));
        for (int64_t k = 0; k < size; k++)
            for (int64_t j = 0; j < size; j++) {
                const uint32_t negative = (mixed(static_cast<uint32_t>(k), key) >> 16) + static_cast<uint32_t>(std::popcount(static_cast<uint64_t>(j & k)));
                matrix[k * size + j] = negative & 1 ? -root : root;
            }
    }

    // `COUNT` columns of vectors, or of single elements, of a tile whose rows are `stride` elements apart. The attribute lets the
    // compiler fuse products with sums, which only numbers below 2^-120 notice, as these products are exact.
    template <class Parts, int64_t COUNT>
    __attribute__((optimize("fp-contract=fast"))) void across(const float* from, float* to, int64_t stride) const {
        typedef typename Parts::Type Vector;
        constexpr int64_t STEP = sizeof(Vector) / sizeof(float);
        const auto in = [&](int64_t row, int64_t n) -> const Vector& { return *reinterpret_cast<const Vector*>(from + row * stride + STEP * n); };
        const auto out = [&](int64_t row, int64_t n) -> Vector& { return *reinterpret_cast<Vector*>(to + row * stride + STEP * n); };
        for (int64_t k = 0; k < size; k++)  // the next columns: the processor itself prefetches within a row only
            for (int64_t n = COUNT; n < 2 * COUNT; n++) __builtin_prefetch(&in(k, n)), __builtin_prefetch(&out(k, n), 1);
        for (int64_t n = 0; n < COUNT; n++) out(0, n) = matrix[0] * in(0, n) + 0.0f;
        for (int64_t half = 1; half < size; half *= 2)
            for (int64_t j = 0; j < half; j++) {
                Vector low[COUNT], high[COUNT];
#pragma GCC unroll 4
                for (int64_t n = 0; n < COUNT; n++) low[n] = high[n] = out(j, n);
                for (int64_t k = half; k < 2 * half; k++) {
                    const float factor = matrix[k * size + j];
#pragma GCC unroll 4
                    for (int64_t n = 0; n < COUNT; n++) {
                        low[n] = low[n] + factor * in(k, n);
                        high[n] = high[n] - factor * in(k, n);
                    }
                }
#pragma GCC unroll 4
                for (int64_t n = 0; n < COUNT; n++) out(j, n) = low[n], out(j + half, n) = high[n];
            }
    }

    // `TILES` tiles of contiguous elements, one after the other
    template <int64_t TILES>
    __attribute__((optimize("fp-contract=fast"))) void along(const float* from, float* to) const {
        const auto out = [&](int64_t tile, int64_t j) -> Lanes& { return *reinterpret_cast<Lanes*>(to + tile * size + j); };
        for (int64_t half = 0; half < size; half = half ? 2 * half : WIDTH)
            for (int64_t j = 0; j < std::max(half, WIDTH); j += WIDTH) {
                Lanes low[TILES], high[TILES];
#pragma GCC unroll 4
                for (int64_t tile = 0; tile < TILES; tile++) low[tile] = high[tile] = half ? out(tile, j) : Lanes{};
                for (int64_t k = half; k < std::max(2 * half, WIDTH); k++) {
                    const Lanes factors = *reinterpret_cast<const Lanes*>(&matrix[k * size + j]);
#pragma GCC unroll 4
                    for (int64_t tile = 0; tile < TILES; tile++) {
                        low[tile] = low[tile] + factors * from[tile * size + k];
                        high[tile] = high[tile] - factors * from[tile * size + k];
                    }
                }
#pragma GCC unroll 4
                for (int64_t tile = 0; tile < TILES; tile++) {
                    out(tile, j) = low[tile];
                    if (half) out(tile, j + half) = high[tile];
                }
            }
    }

    // The tiles of [length, inner]; elements beyond the last whole tile are copied
    void apply(const float* from, float* to, int64_t length, int64_t inner) const {
        const int64_t tiles = length / size;
        int64_t tile = 0;
        if (inner == 1)
            for (; tile + TOGETHER <= tiles; tile += TOGETHER) along<TOGETHER>(from + tile * size, to + tile * size);
        for (; tile < tiles; tile++) {
            const int64_t at = tile * size * inner;
            int64_t lane = 0;
            if (inner == 1) along<1>(from + at, to + at), lane = 1;
            for (; lane + TOGETHER * WIDTH <= inner; lane += TOGETHER * WIDTH) across<Vectors, TOGETHER>(from + at + lane, to + at + lane, inner);
            for (; lane + WIDTH <= inner; lane += WIDTH) across<Vectors, 1>(from + at + lane, to + at + lane, inner);
            for (; lane < inner; lane++) across<Elements, 1>(from + at + lane, to + at + lane, inner);
        }
        std::copy(from + tiles * size * inner, from + length * inner, to + tiles * size * inner);
    }
};

}  // namespace bitcycle
