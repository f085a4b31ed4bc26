// ReLU of a tensor or of a sum as an autograd node; notes the range of its output for the quantizer that reads it next.

#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "batch_norm.h"
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

inline void add(const float* a, const float* b, float* __restrict to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = a[i] + b[i];
}

inline void mask(const float* from, const uint8_t* passed, float* to, int64_t count) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) to[i] = passed[i] ? from[i] : 0.0f;
}

// y = max(x, 0) or, if `added` is given, max(x + added, 0), and its range; where it is positive becomes `passed` if that is defined
inline Range rectify(const at::Tensor& x, const std::optional<at::Tensor>& added, const at::Tensor& y, const at::Tensor& passed) {
    const float* from = x.const_data_ptr<float>();
    const float* other = added ? added->const_data_ptr<float>() : nullptr;
    float* to = y.mutable_data_ptr<float>();
    uint8_t* elements = passed.defined() ? passed.mutable_data_ptr<uint8_t>() : nullptr;
    return range_after(to, x.numel(), HOT, [&](int64_t first, int64_t last) {
        const float* here = other ? to + first : from + first;
        if (other) add(from + first, other + first, to + first, last - first);
        if (elements) rectify(here, to + first, elements + first, last - first);
        else rectify(here, to + first, last - first);
    });
}

// Saves a mask of one byte per element
struct MaskSavingRelu : torch::autograd::Function<MaskSavingRelu> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& added,
                              bool inplace, Range* range) {
        at::Tensor y = inplace ? x : at::empty_like(x);
        const at::Tensor passed = at::empty_like(x, x.options().dtype(at::kByte));
        *range = rectify(x, added, y, passed);
        if (inplace) context->mark_dirty({y});
        context->save_for_backward({passed});
        context->saved_data["sum"] = added.has_value();
        return y;
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
        const at::Tensor passed = context->get_saved_variables()[0];
        at::Tensor of_x;
        if (at::GradMode::is_enabled()) {
            of_x = at::where(passed.to(at::kBool), gradients[0], 0);  // differentiable
        } else {
            const bool ours = is_ours(gradients[0]);
            const at::Tensor gradient = gradients[0].strides() == passed.strides() ? gradients[0] : at::empty_like(passed, gradients[0].options()).copy_(gradients[0]);
            of_x = ours && gradient.is_same(gradients[0]) ? gradient : at::empty_like(gradient);
            of_x.unsafeGetTensorImpl()->bump_version();  // notes about it are out of date
            const float* from = gradient.const_data_ptr<float>();
            const uint8_t* elements = passed.const_data_ptr<uint8_t>();
            float* to = of_x.mutable_data_ptr<float>();
            at::parallel_for(0, gradient.numel(), GRAIN, [&](int64_t first, int64_t last) {
                mask(from + first, elements + first, to + first, last - first);
            });
        }
        return {of_x, context->saved_data["sum"].toBool() ? of_x : at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

#ifdef BITCYCLE_BATCH_NORM
// After batch norm, in its node; returns whether x is the output of one
inline bool rectify_batch_norm(const at::Tensor& x) {
    const TrainedBatchNorm* before = batch_norm_before<TrainedBatchNorm>(x);
    if (!before) return false;
    const at::Tensor passed = at::empty_like(x, x.options().dtype(at::kByte));
    const Range range = rectify(x, std::nullopt, x, passed);
    auto node = new_node<TrainedBatchNorm>();
    node->weight = before->weight, node->mean = before->mean, node->inverse = before->inverse, node->eps = before->eps;
    node->passed = SavedVariable(passed, false);
    take_its_place(x, node, *before);
    take_note(x, range);
    return true;
}
#else
inline bool rectify_batch_norm(const at::Tensor&) { return false; }
#endif

// In place only without `added`; x and `added` are dense and of the same layout
inline at::Tensor mask_saving_relu(at::Tensor x, const std::optional<at::Tensor>& added, bool inplace) {
    inplace = inplace && !added;
    if (inplace && rectify_batch_norm(x)) return x;
    Range range;
    at::Tensor y;
    if (at::GradMode::is_enabled() && (x.requires_grad() || (added && added->requires_grad()))) {
        y = MaskSavingRelu::apply(x, added, inplace, &range);
    } else {
        y = inplace ? x : at::empty_like(x);
        range = rectify(x, added, y, at::Tensor());
        if (inplace && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
    }
    take_note(y, range);
    return y;
}

}  // namespace bitcycle
