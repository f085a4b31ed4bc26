// CPU implementation of sums of sign vectors (multibit.py), one vector at a time in the cache instead of some sixty PyTorch
// operators. The results are those of PyTorch's operators but for the rounding of the least squares, which both solve in float64.
// Compile without contraction of a * b + c, as affine.cpp.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace bitcycle {
namespace {

using at::Tensor;

constexpr int64_t MAXIMUM_BITS = 4;

// The normal equations of up to four sign vectors: `products` holds b_i . b_j / n, its last column b_i . w / n
struct NormalEquations {
    double products[MAXIMUM_BITS][MAXIMUM_BITS + 1];

    // a that solves the first k equations: Gaussian elimination of a copy, with pivots in rows
    void solve(int64_t k, double ridge, float* a) const {
        double rows[MAXIMUM_BITS][MAXIMUM_BITS + 1], solution[MAXIMUM_BITS];
        for (int64_t i = 0; i < k; i++) {
            std::copy_n(products[i], k, rows[i]);
            rows[i][i] += ridge, rows[i][k] = products[i][MAXIMUM_BITS];
        }
        for (int64_t i = 0; i < k; i++) {
            int64_t pivot = i;
            for (int64_t j = i + 1; j < k; j++)
                if (std::abs(rows[j][i]) > std::abs(rows[pivot][i])) pivot = j;
            std::swap(rows[i], rows[pivot]);
            for (int64_t j = i + 1; j < k; j++) {
                const double factor = rows[j][i] / rows[i][i];
                for (int64_t column = i; column <= k; column++) rows[j][column] -= factor * rows[i][column];
            }
        }
        for (int64_t i = k - 1; i >= 0; i--) {
            solution[i] = rows[i][k];
            for (int64_t j = i + 1; j < k; j++) solution[i] -= rows[i][j] * solution[j];
            solution[i] /= rows[i][i], a[i] = static_cast<float>(solution[i]);
        }
    }
};

// y = B a for one vector w of n elements and k sign vectors, which are chosen one after the other; signs [k, n], rest [n]: memory
void reconstruct_row(const float* w, float* y, int64_t n, int64_t k, double ridge, float* signs, float* rest) {
    NormalEquations equations;
    float a[MAXIMUM_BITS];
    std::copy_n(w, n, rest);
    for (int64_t i = 0; i < k; i++) {
        float* own = signs + i * n;
        for (int64_t e = 0; e < n; e++) own[e] = rest[e] >= 0 ? 1.0f : -1.0f;
        double value = 0;
#pragma omp simd reduction(+ : value)
        for (int64_t e = 0; e < n; e++) value += static_cast<double>(own[e]) * w[e];
        if (!std::isfinite(value)) return void(std::fill_n(y, n, std::numeric_limits<float>::quiet_NaN()));
        equations.products[i][MAXIMUM_BITS] = value / n;
        for (int64_t j = 0; j <= i; j++) {
            int64_t equal = 0;
            for (int64_t e = 0; e < n; e++) equal += own[e] == signs[j * n + e];
            equations.products[i][j] = equations.products[j][i] = static_cast<double>(2 * equal - n) / n;
        }
        equations.solve(i + 1, ridge, a);
        for (int64_t e = 0; e < n; e++) {
            y[e] = signs[e] * a[0];
            for (int64_t j = 1; j <= i; j++) y[e] += signs[j * n + e] * a[j];
            rest[e] = w[e] - y[e];
        }
    }
}

// Each row of vectors [R, F] as the sum of `bits` scaled sign vectors; 0 bits returns the vectors. ridge: added to the diagonal
Tensor reconstruct_sign_vectors(const Tensor& vectors, const Tensor& bits, double ridge) {
    at::NoGradGuard no_grad;
    const int64_t k = std::min(*bits.const_data_ptr<int64_t>(), MAXIMUM_BITS);
    if (k < 1 || vectors.numel() == 0) return vectors;
    const Tensor w = vectors.contiguous();
    Tensor y = at::empty_like(w);
    const int64_t n = w.size(1);
    const float* from = w.const_data_ptr<float>();
    float* to = y.mutable_data_ptr<float>();
    at::parallel_for(0, w.size(0), std::max<int64_t>(1, 4096 / n), [&](int64_t begin, int64_t end) {
        std::vector<float> memory((k + 1) * n);
        for (int64_t row = begin; row < end; row++)
            reconstruct_row(from + row * n, to + row * n, n, k, ridge, memory.data(), memory.data() + k * n);
    });
    return y;
}

}  // namespace
}  // namespace bitcycle

TORCH_LIBRARY_FRAGMENT(bitcycle, library) {
    library.def("reconstruct_sign_vectors(Tensor vectors, Tensor bits, float ridge) -> Tensor", &bitcycle::reconstruct_sign_vectors);
}
