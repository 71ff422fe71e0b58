// SPDX-License-Identifier: Apache-2.0
//
// From a ragged batch to two sparse-attention layers on the CPU: layer 0 is full (it selects),
// layer 1 is shared (it attends to its own KV at the positions that layer 0 selected).
//
// The numbers are chosen so that the output can be checked by eye: the score of a token is its
// index key; the attention queries are zero, so each output is the mean of the selected tokens'
// values; layer 0 stores the position of a token as its value, layer 1 ten times that.
#include <indexshare/indexshare.hpp>

#include <cstddef>
#include <cstdio>
#include <vector>

using namespace indexshare;
constexpr Space host = Space::host;

namespace {

/// Prints a refusal. Every call of the library that can fail returns a Status or a Result.
bool good(Status const& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "layer %d: %s (expected %lld, got %lld)\n", status.layer, status.what,
                 static_cast<long long>(status.expected), static_cast<long long>(status.got));
  }
  return status.ok();
}

using Layer = SparseAttentionLayer<ReluDotIndexer<float, format::Plain<float>>, RadixTopK,
                                   Pattern<"FS">, SparseMla<float, format::Plain<float>>>;

}  // namespace

int main() {
  HostExec<> const exec;  // the calling thread; HostExec<Pool>{pool} runs on yours

  // What a call may bring at most (rows, keys) and the model's widths.
  Shape const shape{.rows = 4,
                    .keys = 8,
                    .top_k = 3,
                    .index_heads = 1,
                    .index_dim = 1,
                    .heads = 1,
                    .key_dim = 2,
                    .value_dim = 1};

  // Two requests with 6 and 3 tokens. Caches are contiguous here: [2 requests, 8 tokens, lanes].
  std::vector<position_t> const token_positions{0, 1, 2, 3, 4, 5, 0, 1, 2};
  std::vector<position_t> const token_requests{0, 0, 0, 0, 0, 0, 1, 1, 1};
  std::vector<float> const token_index_keys{3, 9, 1, 7, 5, 8, 2, 6, 4};
  auto const table = make_contiguous_table<host>(Keys{8});
  std::vector<float> index_keys(2 * 8 * 1);  // of layer 0: shared layers have none
  std::vector<std::vector<float>> kv(2,
                                     std::vector<float>(2 * 8 * 2));  // every layer has its own KV
  auto const index_cache =
      make_contiguous_cache<host>(index_keys.data(), Requests{2}, Keys{8}, HeadDim{1});

  // Appending is a call of its own, made before the layer runs.
  Rows const tokens{9};
  auto const positions = make_lengths<host>(token_positions.data(), tokens);
  auto const requests = make_lengths<host>(token_requests.data(), tokens);
  if (!good(append_rows(exec,
                        make_dense<host, float const, 2>(token_index_keys.data(), {tokens.n, 1}),
                        positions, requests, table, index_cache))) {
    return 1;
  }
  for (std::size_t layer = 0; layer < 2; ++layer) {
    std::vector<float> rows;  // [tokens, latent | rope]; the value is the latent, one lane here
    for (position_t const position : token_positions) {
      rows.push_back(static_cast<float>(position) * (layer == 0 ? 1.0f : 10.0f));
      rows.push_back(0);
    }
    auto const cache =
        make_contiguous_cache<host>(kv[layer].data(), Requests{2}, Keys{8}, HeadDim{2});
    if (!good(append_rows(exec, make_dense<host, float const, 2>(rows.data(), {tokens.n, 2}),
                          positions, requests, table, cache))) {
      return 1;
    }
  }

  // The query rows of this forward: the last two tokens of each request. A row sees its own token
  // and all before it; `lengths` says how many that are.
  Rows const rows{4};
  std::vector<position_t> const row_lengths{5, 6, 2, 3};
  std::vector<position_t> const row_requests{0, 0, 1, 1};
  std::vector<float> const index_q(4, 1.0f), weights(4, 1.0f), q(4 * 2, 0.0f);
  std::vector<float> out(4);

  // The state carries the selection from the full layer to the shared one; the workspace is
  // scratch without a meaning between calls.
  HostMemory state_memory(SelectionState<host>::size(rows, TopK{3}));
  auto state = SelectionState<host>::make(state_memory.view(), rows, TopK{3});
  if (!state) {
    good(state.error());
    return 1;
  }

  for (std::int32_t number = 0; number < 2; ++number) {
    Layer const layer{.shape = shape, .layer = number};
    Layer::inputs<host> in{};
    in.batch = {make_lengths<host>(row_lengths.data(), rows),
                make_lengths<host>(row_requests.data(), rows), table, table};
    in.id = {.forward = 1, .batch = 0};
    in.attention.q = make_query<host>(q.data(), rows, Heads{1}, HeadDim{2});
    in.attention.kv = make_contiguous_cache<host>(kv[static_cast<std::size_t>(number)].data(),
                                                  Requests{2}, Keys{8}, HeadDim{2});
    in.attention.scale = 1.0f;
    if (layer.is_full()) {
      in.indexer = {make_query<host>(index_q.data(), rows, Heads{1}, HeadDim{1}),
                    make_head_weights<host>(weights.data(), rows, Heads{1}), index_cache};
    }

    Result<WorkspaceSize> const need = layer.workspace(exec, std::size_t{1} << 20);
    if (!need) {
      good(need.error());
      return 1;
    }
    HostMemory scratch(*need);
    if (!good(layer.run(exec, in, *state,
                        {make_output<host>(out.data(), rows, Heads{1}, HeadDim{1})},
                        scratch.view()))) {
      return 1;
    }

    std::printf("layer %d, %s, reads the selection of layer %d\n", number,
                layer.is_full() ? "full" : "shared", layer.source());
    auto const selection = state->selection();
    for (index_t row = 0; row < rows.n; ++row) {
      std::printf("  request %d, %d keys visible: positions",
                  row_requests[static_cast<std::size_t>(row)],
                  row_lengths[static_cast<std::size_t>(row)]);
      for (position_t j = 0; j < selection.counts(row); ++j)
        std::printf(" %d", selection.indices(row, j));
      std::printf(", output %.2f\n", static_cast<double>(out[static_cast<std::size_t>(row)]));
    }
  }
}
