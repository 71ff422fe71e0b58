// SPDX-License-Identifier: Apache-2.0
//
// Two share groups of one full and three shared layers. The KV of the shared layers lies in far
// memory (here: just other memory). As soon as a full layer has selected it is known which rows its
// shared layers will read: a second thread copies those of layer n + 1 into a staging cache while
// the first attends to layer n. Compared with a run that reads far memory directly.
//
//   08_prefetch_host [--trace FILE]   writes who did what when as an SVG picture
#include <indexshare/indexshare.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace indexshare;

constexpr Space host = Space::host;
using Cached = format::Plain<bf16>;
using Share = Pattern<"FSSSFSSS">;
using Layer =
    SparseAttentionLayer<ReluDotIndexer<bf16, Cached>, RadixTopK, Share, SparseMla<bf16, Cached>>;
using Cache = MutableCacheView<host, Cached>;

constexpr std::int32_t layers = 8;
constexpr Requests requests{4};
constexpr Keys keys{2048};  // room of each request
constexpr PageSize page_size{64};
constexpr Pages pages{requests.n * keys.n / page_size.n};
constexpr index_t slots = pages.n * page_size.n;
constexpr index_t chunk = 8;  // tokens of each request in this forward: one and 7 drafts
constexpr Rows row_count{requests.n * chunk};
constexpr TopK selected{512};
constexpr Shape model{.rows = row_count.n,
                      .keys = keys.n,
                      .top_k = selected.n,
                      .index_heads = 1,
                      .index_dim = 128,
                      .heads = 2,
                      .key_dim = 576,
                      .value_dim = 512};

void require(Status const& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "layer %d: %s (expected %lld, got %lld)\n", status.layer, status.what,
               static_cast<long long>(status.expected), static_cast<long long>(status.got));
  std::exit(1);
}

/// Whole numbers from -limit to limit: index scores are then exact in any order of summing.
template <class T>
std::vector<T> numbers(index_t count, std::uint32_t seed, int limit) {
  std::vector<T> values(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 2654435761u + 1;
  for (T& value : values) {
    state = state * 1664525u + 1013904223u;
    int const number = static_cast<int>((state >> 16) % static_cast<std::uint32_t>(2 * limit + 1));
    value = from_float<T>(static_cast<float>(number - limit));
  }
  return values;
}

/// What the layers read: queries, index keys, KV rows. Those of the newest tokens are appended by
/// the forward itself, layer by layer.
struct Model {
  std::vector<position_t> lengths, request_of, positions, table;
  std::vector<bf16> q = numbers<bf16>(row_count.n * model.heads * model.key_dim, 1, 3);
  std::vector<bf16> index_q =
      numbers<bf16>(row_count.n * model.index_heads * model.index_dim, 2, 3);
  std::vector<float> weights = numbers<float>(row_count.n * model.index_heads, 3, 2);
  std::vector<bf16> index_keys[2] = {numbers<bf16>(slots * model.index_dim, 4, 3),
                                     numbers<bf16>(slots* model.index_dim, 5, 3)};
  std::vector<std::vector<bf16>> kv, new_kv;  // by layer; that of shared layers is far away

  Model() {
    for (std::uint32_t n = 0; n < layers; ++n) {
      kv.push_back(numbers<bf16>(slots * model.key_dim, 10 + n, 8));
      new_kv.push_back(numbers<bf16>(row_count.n * model.key_dim, 30 + n, 8));
    }
    for (position_t r = 0; r < requests.n; ++r) {
      for (position_t i = 0; i < chunk; ++i) {
        lengths.push_back(static_cast<position_t>(keys.n) - 100 * r -
                          static_cast<position_t>(chunk) + i + 1);
        positions.push_back(lengths.back() - 1);
        request_of.push_back(r);
      }
    }
    for (position_t page = 0; page < pages.n; ++page)
      table.push_back(5 * page % static_cast<position_t>(pages.n));
  }
  LengthView<host> view(std::vector<position_t> const& values) const {
    return make_lengths<host>(values.data(), Rows{static_cast<index_t>(values.size())});
  }
  PageTable<host> pages_of_requests() const {
    return make_page_table<host>(table.data(), requests, Pages{pages.n / requests.n}, page_size);
  }
  Cache cache(std::int32_t n) {
    return make_paged_cache<host>(kv[static_cast<std::size_t>(n)].data(), pages, page_size,
                                  HeadDim{model.key_dim});
  }
  Cache index_cache(std::int32_t n) {
    return make_paged_cache<host>(index_keys[n / 4].data(), pages, page_size,
                                  HeadDim{model.index_dim});
  }
};

// ---- one forward

/// State, outputs and scratch of a forward; `append` and `attend` are one layer.
struct Forward {
  Model& from;
  HostExec<> exec{};
  HostMemory memory{SelectionState<host>::size(row_count, selected)};
  SelectionState<host> state =
      SelectionState<host>::make(memory.view(), row_count, selected).value();
  HostMemory scratch{Layer{.shape = model}.workspace(exec, std::size_t{1} << 24).value()};
  std::vector<std::vector<float>> out{
      layers,
      std::vector<float>(static_cast<std::size_t>(row_count.n* model.heads* model.value_dim))};

  explicit Forward(Model& m) : from(m) {}

  void append(std::int32_t n) {
    auto const rows = make_dense<host, bf16 const, 2>(
        from.new_kv[static_cast<std::size_t>(n)].data(), {row_count.n, model.key_dim});
    require(append_rows(exec, rows, from.view(from.positions), from.view(from.request_of),
                        from.pages_of_requests(), from.cache(n)));
  }
  void attend(std::int32_t n, Cache const& kv, PageTable<host> const& kv_pages) {
    Layer const layer{.shape = model, .layer = n};
    Layer::inputs<host> in{};
    in.batch = {from.view(from.lengths), from.view(from.request_of), from.pages_of_requests(),
                kv_pages};
    in.id = {.forward = 1};
    in.attention = {
        make_query<host>(from.q.data(), row_count, Heads{model.heads}, HeadDim{model.key_dim}), kv,
        1.0f / 512};
    if (layer.is_full()) {
      in.indexer = {
          make_query<host>(from.index_q.data(), row_count, Heads{model.index_heads},
                           HeadDim{model.index_dim}),
          make_head_weights<host>(from.weights.data(), row_count, Heads{model.index_heads}),
          from.index_cache(n)};
    }
    auto const output = make_output<host>(out[static_cast<std::size_t>(n)].data(), row_count,
                                          Heads{model.heads}, HeadDim{model.value_dim});
    require(layer.run(exec, in, state, {output}, scratch.view()));
  }
  void run_directly() {
    for (std::int32_t n = 0; n < layers; ++n) {
      append(n);
      attend(n, from.cache(n), from.pages_of_requests());
    }
  }
};

// ---- who did what when

using Clock = std::chrono::steady_clock;

struct Box {
  std::string name;
  Clock::time_point begin, end;
};

/// The boxes of one thread.
class Lane {
 public:
  template <class Work>
  void record(std::string name, Work const& work) {
    auto const begin = Clock::now();
    work();
    boxes_.push_back({std::move(name), begin, Clock::now()});
  }
  std::vector<Box> const& boxes() const { return boxes_; }

 private:
  std::vector<Box> boxes_;
};

void write_picture(char const* path, Lane const& computing, Lane const& copying) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path);
    std::exit(1);
  }
  auto const begin = computing.boxes().front().begin;
  auto const ms = [&](Clock::time_point t) {
    return std::chrono::duration<double, std::milli>(t - begin).count();
  };
  double const total = ms(computing.boxes().back().end);
  double const left = 70, width = 880;
  auto const x = [&](double t) { return left + t / total * width; };
  std::fprintf(file,
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 970 130\" "
               "font-family=\"sans-serif\" font-size=\"11\">\n"
               "<rect width=\"970\" height=\"130\" fill=\"white\"/>\n");
  struct Row {
    Lane const& lane;
    char const* title;
    char const* color;
    int y;
  };
  for (Row const& row :
       {Row{computing, "attention", "#9ecae1", 12}, Row{copying, "copies", "#fdae6b", 56}}) {
    std::fprintf(file, "<text x=\"8\" y=\"%d\">%s</text>\n", row.y + 22, row.title);
    for (Box const& box : row.lane.boxes()) {
      double const from = x(ms(box.begin));
      double const to = x(ms(box.end));
      std::fprintf(
          file,
          "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"34\" fill=\"%s\" "
          "stroke=\"#444\" stroke-width=\"0.5\"><title>layer %s: %.2f to %.2f ms</title></rect>\n"
          "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
          from, row.y, to - from, row.color, box.name.c_str(), ms(box.begin), ms(box.end),
          (from + to) / 2, row.y + 22, box.name.c_str());
    }
  }
  double step = 0.1;  // of the axis: 1, 2 or 5 times a power of ten, at most ten of them
  for (int i = 0; total / step > 10; ++i) step *= i % 3 == 1 ? 2.5 : 2;
  for (double t = 0; t <= total; t += step) {
    std::fprintf(file,
                 "<path d=\"M%.1f 98v5\" stroke=\"#444\"/><text x=\"%.1f\" y=\"116\" "
                 "text-anchor=\"middle\">%g</text>\n",
                 x(t), x(t), t);
  }
  std::fprintf(
      file,
      "<path d=\"M%.0f 98h%.0f\" stroke=\"#444\"/><text x=\"8\" y=\"116\">ms</text>\n</svg>\n",
      left, width);
  std::fclose(file);
}

// ---- the same forward with prefetched rows

/// Two staging caches suffice: that of a layer is filled again once the layer has attended.
class Prefetched : public Forward {
 public:
  using Forward::Forward;

  void run() {
    std::thread copier([this] { copy_all(); });
    for (std::int32_t n = 0; n < layers; ++n) {
      bool const full = share_source(Share{}, n) == n;
      if (!full) copied_.acquire();
      // The layer's newest rows exist only now: the copy has missed them.
      append(n);
      if (full) {
        computing.record(std::to_string(n) + " full", [&] {
          attend(n, from.cache(n), from.pages_of_requests());
          plan();
        });
        planned_.release();
      } else {
        require(copy_rows(exec, from.cache(n), SlotView<host>(view(new_slots_)), staging(n),
                          SlotView<host>(view(new_rows_))));
        computing.record(std::to_string(n),
                         [&] { attend(n, staging(n), list.pages(from.pages_of_requests())); });
        free_.release();
      }
    }
    copier.join();
  }

  Lane computing, copying;
  std::vector<position_t> listed_ =
      std::vector<position_t>(prefetch_capacity(row_count, selected, slots));
  std::vector<position_t> count_ = std::vector<position_t>(1);
  PrefetchList<host> list = make_prefetch_list<host>(
      listed_.data(), count_.data(), Rows{static_cast<index_t>(listed_.size())}, page_size);

 private:
  static Tensor<host, position_t, 1> view(std::vector<position_t>& values) {
    return make_dense<host, position_t, 1>(values.data(), {static_cast<index_t>(values.size())});
  }
  Cache staging(std::int32_t n) {
    return make_paged_cache<host>(staging_[n % 2].data(), Pages{list.blocks()}, page_size,
                                  HeadDim{model.key_dim});
  }
  void plan() {
    require(plan_prefetch(exec, slots, state, list, plan_scratch_.view()));
    require(appended_rows(exec, list, from.view(from.positions), from.view(from.request_of),
                          from.pages_of_requests(), view(new_slots_), view(new_rows_)));
  }
  /// The second thread: the rows of one shared layer after the other.
  void copy_all() {
    for (std::int32_t n = 0; n < layers; ++n) {
      if (share_source(Share{}, n) == n) {
        planned_.acquire();
        continue;
      }
      free_.acquire();
      copying.record(std::to_string(n), [&] {
        require(copy_rows(exec, from.cache(n), SlotView<host>(list.slots), staging(n), {}));
      });
      copied_.release();
    }
  }

  std::vector<bf16> staging_[2] = {
      std::vector<bf16>(static_cast<std::size_t>(list.blocks() * page_size.n * model.key_dim)),
      std::vector<bf16>(static_cast<std::size_t>(list.blocks() * page_size.n * model.key_dim))};
  std::vector<position_t> new_slots_ =
      std::vector<position_t>(static_cast<std::size_t>(row_count.n));
  std::vector<position_t> new_rows_ =
      std::vector<position_t>(static_cast<std::size_t>(row_count.n));
  HostMemory plan_scratch_{prefetch_workspace(exec, slots)};
  std::counting_semaphore<> planned_{0};  // lists of groups
  std::counting_semaphore<> copied_{0};   // layers whose rows are there
  std::counting_semaphore<> free_{2};     // staging caches
};

}  // namespace

int main(int argc, char** argv) {
  bool const wants_picture = argc == 3 && std::strcmp(argv[1], "--trace") == 0;
  if (argc != 1 && !wants_picture) {
    std::fprintf(stderr, "usage: %s [--trace FILE]\n", argv[0]);
    return 2;
  }
  Model inputs;
  Prefetched prefetched(inputs);
  prefetched.run();
  Forward direct(inputs);
  direct.run_directly();

  std::printf("rows fetched for each shared layer: %d of %lld\n", prefetched.count_[0],
              static_cast<long long>(slots));
  int equal = 0;
  std::size_t const width = static_cast<std::size_t>(model.heads * model.value_dim);
  for (std::size_t n = 0; n < layers; ++n) {
    for (std::size_t row = 0; row < static_cast<std::size_t>(row_count.n); ++row) {
      equal += std::memcmp(&prefetched.out[n][row * width], &direct.out[n][row * width],
                           width * sizeof(float)) == 0;
    }
  }
  std::printf("%d of %lld rows equal\n", equal, static_cast<long long>(layers * row_count.n));
  if (wants_picture) write_picture(argv[2], prefetched.computing, prefetched.copying);
  return equal == layers * row_count.n ? 0 : 1;
}
