// The mask-saving ReLU as an autograd node; notes the range of its output for the quantizer that reads it next.

#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include "node.h"
#include "notes.h"

namespace bitcycle {

// Element by element, also in place: ivdep tells the compiler so

inline void rectify(const float* from, float* to, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) to[i] = from[i] < 0 ? 0 : from[i];
}

inline void rectify(const float* from, float* to, uint8_t* __restrict passed, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float x = from[i];
        passed[i] = x < 0 || x == 0 ? 0 : 1;  // 1 for nan
        to[i] = x < 0 ? 0 : x;
    }
}

inline void mask(const float* from, const uint8_t* passed, float* to, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) to[i] = passed[i] ? from[i] : 0.0f;
}

struct MaskSavingRelu : torch::autograd::Function<MaskSavingRelu> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool inplace, Range* range) {
        at::Tensor y = inplace ? x : at::empty_like(x);
        at::Tensor passed = at::empty_like(x, x.options().dtype(at::kByte));
        const float* from = x.const_data_ptr<float>();
        float* to = y.mutable_data_ptr<float>();
        uint8_t* elements = passed.mutable_data_ptr<uint8_t>();
        *range = range_after(to, x.numel(), HOT, [&](int64_t first, int64_t last) {
            rectify(from + first, to + first, elements + first, last - first);
        });
        if (inplace) context->mark_dirty({y});
        context->save_for_backward({passed});
        return y;
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const at::Tensor passed = context->get_saved_variables()[0];
        if (at::GradMode::is_enabled()) return {at::where(passed.to(at::kBool), gradients[0], 0), at::Tensor(), at::Tensor()};  // differentiable
        const bool ours = is_ours(gradients[0]);
        const at::Tensor gradient = gradients[0].strides() == passed.strides() ? gradients[0] : at::empty_like(passed, gradients[0].options()).copy_(gradients[0]);
        at::Tensor of_x = ours && gradient.is_same(gradients[0]) ? gradient : at::empty_like(gradient);
        const float* from = gradient.const_data_ptr<float>();
        const uint8_t* elements = passed.const_data_ptr<uint8_t>();
        float* to = of_x.mutable_data_ptr<float>();
        at::parallel_for(0, gradient.numel(), GRAIN, [&](int64_t first, int64_t last) {
            mask(from + first, elements + first, to + first, last - first);
        });
        return {of_x, at::Tensor(), at::Tensor()};
    }
};

inline at::Tensor mask_saving_relu(const at::Tensor& x, bool inplace) {
    Range range;
    at::Tensor y = MaskSavingRelu::apply(x, inplace, &range);
    take_note(y, range);
    return y;
}

}  // namespace bitcycle
