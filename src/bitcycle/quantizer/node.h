// New nodes of the autograd graph.

#pragma once

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

}  // namespace bitcycle
