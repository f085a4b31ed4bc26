// Nodes of the autograd graph, and gradients that they may change in place.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace bitcycle {

// PyTorch 2.13 stores the reference count in the node, 2.11 uses a shared_ptr
template <class Node>
auto new_node() {
    if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>) {
        return std::make_shared<Node>();
    } else {
        return c10::make_intrusive<Node>();
    }
}

// Whether nobody else sees the memory of a gradient, so that a result may take it; PyTorch's engine asks the same to add in place
inline bool is_ours(const at::Tensor& gradient) {
    return gradient.use_count() == 1 && gradient.has_storage() && gradient.storage().use_count() == 1 &&
           gradient.is_non_overlapping_and_dense() && !at::GradMode::is_enabled();
}

}  // namespace bitcycle
