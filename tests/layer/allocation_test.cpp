// SPDX-License-Identifier: Apache-2.0
//
// run allocates nothing and frees nothing (contracts 5.2). This file replaces the program's
// operator new or, with glibc, malloc; under a sanitizer it asks the sanitizer.
#include "frontend_model.hpp"
#include "session.hpp"
#include "worker_pool.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> allocations{0};
std::atomic<long> releases{0};
}  // namespace

#if defined(__SANITIZE_THREAD__) || defined(TEST_HAS_ASAN)
#define LAYER_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LAYER_TEST_SANITIZED 1
#endif
#endif

#if defined(LAYER_TEST_SANITIZED)
#define LAYER_TEST_COUNTS_MALLOC 1
// Of <sanitizer/allocator_interface.h>, which gcc does not install.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(void const volatile*,
                                                                             std::size_t),
                                                         void (*free_hook)(void const volatile*));
namespace {
[[maybe_unused]] int const hooks = __sanitizer_install_malloc_and_free_hooks(
    [](void const volatile*, std::size_t) { ++allocations; },
    [](void const volatile*) { ++releases; });
}  // namespace
#elif defined(__GLIBC__)
#define LAYER_TEST_COUNTS_MALLOC 1
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);

void* malloc(std::size_t bytes) noexcept {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) noexcept {
  ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* p, std::size_t bytes) noexcept {
  ++allocations;
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  ++allocations;
  return __libc_memalign(alignment, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  ++allocations;
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) noexcept {
  ++allocations;
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? 12 : 0;
}
void free(void* p) noexcept {
  ++releases;
  __libc_free(p);
}
}
#else
// Every other form of new and delete forwards to these four.
void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* const p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept {
  ++releases;
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept { operator delete(p); }
#endif

namespace {
using namespace layer_test;

TEST_CASE("MEM: the counters of this file count", "[allocation]") {
  long const before = allocations;
  long const freed = releases;
  int* volatile one = new int(7);  // volatile: a compiler may leave out new and delete
  void* volatile other = std::malloc(100);
  delete one;
  std::free(other);
#if defined(LAYER_TEST_COUNTS_MALLOC)
  constexpr long seen = 2;
#else
  constexpr long seen = 1;
#endif
  CHECK(allocations - before == seen);
  CHECK(releases - freed == seen);
}

struct Counts {
  long allocations;
  long releases;
  friend bool operator==(Counts const&, Counts const&) = default;
};
Counts now() { return {allocations, releases}; }

/// Runs all layers of a session, full and shared, and a refusal.
template <class X>
void check_no_allocation(X const& x, std::size_t budget) {
  Schedule const share("FSF");
  Shape shape = small_shape;
  shape.keys = 4000;
  Model<> model(share, 3, shape);
  Session session(x, model, share, mixed_rows(), {7, 3}, budget);
  for (std::int32_t number = 0; number < 3; ++number) {
    auto const layer = session.layer(number);
    auto const in = session.inputs(number);
    auto const out = session.outputs(number);
    auto stale = in;
    stale.id.forward = 99;
    Workspace const ws = session.workspace();

    Counts const before = now();
    Status const status = layer.run(x, in, session.state(), out, ws);
    Status const refusal = layer.run(x, stale, session.state(), out, {ws.data, 0});
    auto const size = layer.workspace(x, budget);
    Counts const after = now();

    CHECK_THAT(status, succeeded());
    CHECK_FALSE(refusal.ok());
    CHECK(size.has_value() == (budget != minimum));
    CHECK(after.allocations == before.allocations);
    CHECK(after.releases == before.releases);
  }
  Session next(x, model, MtpDraft{0, true}, chunk(3, 40), {8, 3}, budget);
  auto const batch = next.batch();
  auto const last = test::guarded<position_t>({8});
  auto const rows = numbers(last);
  Counts const before = now();
  Status const compacted = compact_selection(x, session.state(), session.state().tag().id, rows,
                                             {8, 3}, batch, next.state());
  Status const planned = plan_group(x, batch, next.state());
  Counts const after = now();
  CHECK_THAT(compacted, succeeded());
  CHECK_THAT(planned, succeeded());
  CHECK(after == before);
}

TEST_CASE("MEM: run allocates nothing", "[allocation]") {
  std::size_t const budget = GENERATE(minimum, ample);
  SECTION("reference") { check_no_allocation(ReferenceExec{}, budget); }
  SECTION("host, serial") { check_no_allocation(HostExec<>{}, budget); }
  SECTION("host, on a pool of three") {
    WorkerPool pool;
    pool.run(3, [](index_t, index_t, int) {});  // the threads are up
    check_no_allocation(HostExec<PoolFor>{{&pool}}, budget);
  }
}

/// The three sides of a module with everything that a model can have, and a refusal of each.
template <class X>
void check_front_end(X const& x) {
  frontend_test::ModelConfig const config = frontend_test::tiny_hy_v4();
  auto const weights = frontend_test::random_weights(config);
  frontend_test::Tokens const tokens(config, 0, 21);
  frontend_test::Activations sides(config, 21);
  auto const front_end = make_front_end(config, LaneBasis::hadamard).value();
  std::vector<float> const latent(
      static_cast<std::size_t>(21 * config.num_attention_heads * config.kv_lora_rank));
  auto const u = make_dense<Space::host, float const, 3>(
      latent.data(), {21, config.num_attention_heads, config.kv_lora_rank});
  auto const view = weights.view();
  auto const hidden = tokens.hidden();
  auto const positions = tokens.positions();

  Counts const before = now();
  Status const queries = project_queries(x, front_end, view, hidden, positions, sides.queries.side);
  Status const keys = project_keys(x, front_end, view, hidden, positions, sides.keys.side);
  Status const output = project_output(x, front_end, view, hidden, u, sides.outputs.side);
  Status const refusal = project_keys(x, front_end, view, hidden, positions, {});
  Counts const after = now();

  CHECK_THAT(queries, succeeded());
  CHECK_THAT(keys, succeeded());
  CHECK_THAT(output, succeeded());
  CHECK_FALSE(refusal.ok());
  CHECK(after == before);
}

TEST_CASE("MEM: the front end allocates nothing", "[allocation]") {
  SECTION("reference") { check_front_end(ReferenceExec{}); }
  SECTION("host, serial") { check_front_end(HostExec<>{}); }
  SECTION("host, on a pool of three") {
    WorkerPool pool;
    pool.run(3, [](index_t, index_t, int) {});
    check_front_end(HostExec<PoolFor>{{&pool}});
  }
}

}  // namespace
