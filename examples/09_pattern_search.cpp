// SPDX-License-Identifier: Apache-2.0
//
// Which layers of a model may share? The greedy search with a loss that is made up, an evaluator
// that reuses the layers below the first changed one, pipeline stages, and baselines to compare
// with. examples/programs/search.cpp does the same with a command that gives the losses, and keeps
// a log that it goes on from.
#include <indexshare/indexcache/baselines.hpp>
#include <indexshare/indexcache/search.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

using namespace indexshare;

namespace {

constexpr std::int32_t layers = 12;

/// A stand-in for a model: what leaves a layer is what entered it and an error that grows with the
/// distance to the layer's source. Some layers need their own selection more than others.
double run_layer(double entered, indexcache::RolePattern const& pattern, std::int32_t layer) {
  int const need = 1 + layer * 7 % 5;
  return entered + need * (layer - pattern.source(layer)) / 1000.0;
}

/// Evaluates patterns. For a real model, `entered_` holds the activations of the calibration data
/// at each layer under the accepted pattern: the memory that half of the work is saved for.
class Model {
 public:
  double loss(indexcache::RolePattern const& pattern, std::int32_t first_changed) {
    double value = entered_[static_cast<std::size_t>(first_changed)];
    for (std::int32_t layer = first_changed; layer < layers; ++layer, ++layers_run_)
      value = run_layer(value, pattern, layer);
    return value;
  }

  void accept(indexcache::RolePattern const& pattern) {
    for (std::int32_t layer = 0; layer < layers; ++layer, ++layers_run_)
      entered_[static_cast<std::size_t>(layer) + 1] =
          run_layer(entered_[static_cast<std::size_t>(layer)], pattern, layer);
  }

  long long layers_run() const { return layers_run_; }

 private:
  std::vector<double> entered_ = std::vector<double>(layers + 1, 2.0);
  long long layers_run_ = 0;
};

void print(char const* name, indexcache::RolePattern const& pattern) {
  std::printf("%-30s %s  loss %.3f\n", name, pattern_text(pattern).c_str(),
              Model().loss(pattern, 0));
}

}  // namespace

int main() {
  Model model;
  auto evaluator =
      indexcache::one_by_one([&](indexcache::Candidate const& candidate) -> indexcache::Loss {
        return model.loss(candidate.pattern, candidate.first_changed);
      });
  evaluator.accepted = [&](indexcache::RolePattern const& pattern) { model.accept(pattern); };

  indexcache::SearchProblem problem;
  problem.layers = layers;
  problem.shared = 9;
  auto const found = search(problem, evaluator);
  if (!found) {
    std::fprintf(stderr, "error: %s\n", found.error().message().c_str());
    return 2;
  }
  std::printf("all layers full: loss %.3f\n", found->all_full_loss);
  for (indexcache::Flip const& flip : found->flips)
    std::printf("step %d: layer %2d is shared, loss %.3f\n", flip.step, flip.layer, flip.loss);
  std::printf("%lld candidates, %lld layers run, %lld without reuse\n",
              static_cast<long long>(found->evaluations), model.layers_run(),
              static_cast<long long>((found->evaluations + 1) * layers));

  print("searched, 3 full", found->pattern);
  print("searched, 6 full", found->pattern_at(6));
  print("uniform, the paper's rule", indexcache::uniform_paper(layers, 4).value());
  print("uniform, the patches' rule", indexcache::uniform_patches(layers, 4).value());
  print("random", indexcache::random_pattern(layers, 3, 1).value());

  // Two pipeline stages, whose first layers stay full so that no selection crosses the cut.
  problem.blocks = {0, 6};
  print("searched, stages 0:6 and 6:12", search(problem, evaluator)->pattern);

  // What makes no sense is refused before the first evaluation.
  problem.shared = 11;
  std::printf("error: %s\n", search(problem, evaluator).error().message().c_str());
}
