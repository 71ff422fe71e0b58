// SPDX-License-Identifier: Apache-2.0
//
// Prefetch lists: what the shared layers of a group read, and attention over staging caches.
#include "session.hpp"

#if defined(INDEXSHARE_TEST_CUDA)
#include <indexshare/cuda/prefetch.cuh>
#include <indexshare/cuda/records.cuh>
#endif

#include <algorithm>
#include <limits>
#include <memory>
#include <set>

namespace {
using namespace layer_test;
using Numbers = std::vector<position_t>;

/// A prefetch list with guarded memory.
class OwnedList {
 public:
  OwnedList(index_t capacity, index_t page_size)
      : slots_(to_size(capacity), test::unwritten),
        count_(1, test::unwritten),
        page_size_(page_size) {}

  PrefetchList<space> get() {
    return make_prefetch_list<space>(slots_.data(), count_.data(),
                                     Rows{static_cast<index_t>(slots_.size())},
                                     PageSize{page_size_});
  }
  Numbers slots() const { return {slots_.data(), slots_.data() + slots_.size()}; }
  position_t count() const { return count_[0]; }
  bool intact() const { return slots_.intact() && count_.intact(); }

 private:
  test::Guarded<position_t> slots_;
  test::Guarded<position_t> count_;
  index_t page_size_;
};

template <class X>
Status plan(X const& x, index_t cache_slots, SelectionState<space>& state,
            PrefetchList<space> const& list, std::byte fill = test::nan_poison) {
  test::Scratch scratch(prefetch_workspace(x, cache_slots), fill);
  Status const status = plan_prefetch(x, cache_slots, state, list, scratch.get());
  test::finish(x);
  CHECK(scratch.intact());
  return status;
}

// ---- the list and the staged plan, against sets

/// A state whose group plan holds the given slots.
struct PlannedState {
  OwnedState owned;
  index_t rows;

  PlannedState(index_t row_count, index_t top_k, Numbers const& slots)
      : owned(row_count, top_k), rows(row_count) {
    get().set_tag({{1, 0}, static_cast<std::int32_t>(rows), 0});
    auto const view = get().slots(rows);
    REQUIRE(static_cast<index_t>(slots.size()) == rows * top_k);
    for (index_t i = 0; i < rows * top_k; ++i) view(i / top_k, i % top_k) = slots[to_size(i)];
  }
  SelectionState<space>& get() { return owned.get(); }
  Numbers slots() {
    auto const view = get().slots(rows);
    return {view.data_handle(), view.data_handle() + view.extent(0) * view.extent(1)};
  }
};

struct Expected {
  Numbers list, staged;
};
Expected by_hand(Numbers const& slots, index_t cache_slots) {
  std::set<position_t> distinct;
  auto const inside = [&](position_t slot) { return slot >= 0 && slot < cache_slots; };
  std::copy_if(slots.begin(), slots.end(), std::inserter(distinct, distinct.end()), inside);
  Expected expected{{distinct.begin(), distinct.end()}, {}};
  for (position_t const slot : slots) {
    auto const at = std::lower_bound(expected.list.begin(), expected.list.end(), slot);
    expected.staged.push_back(inside(slot) ? static_cast<position_t>(at - expected.list.begin())
                                           : no_position);
  }
  return expected;
}

template <class X>
void check_plan(X const& x, index_t rows, index_t top_k, index_t cache_slots, Numbers const& slots,
                index_t spare = 0) {
  CAPTURE(rows, top_k, cache_slots, spare);
  Expected const expected = by_hand(slots, cache_slots);
  for (std::byte const fill : {std::byte{0xFF}, std::byte{0x5A}}) {
    PlannedState state(rows, top_k, slots);
    OwnedList list(prefetch_capacity(Rows{rows}, TopK{top_k}, cache_slots) + spare, 4);
    auto const tag = state.get().tag();
    REQUIRE_THAT(plan(x, cache_slots, state.get(), list.get(), fill), succeeded());
    Numbers want = expected.list;
    want.resize(list.slots().size(), no_position);
    CHECK(list.slots() == want);
    CHECK(list.count() == static_cast<position_t>(expected.list.size()));
    CHECK(state.slots() == expected.staged);
    CHECK(state.get().tag() == tag);
    CHECK((list.intact() && state.owned.intact()));
  }
}

/// Slots around `center`, some of them nowhere.
Numbers random_slots(std::size_t count, index_t cache_slots, std::uint64_t seed) {
  test::Random random(seed);
  Numbers slots(count);
  for (position_t& slot : slots) {
    auto const kind = random.below(16);
    slot = kind == 0 ? no_position
           : kind == 1
               ? static_cast<position_t>(cache_slots + static_cast<index_t>(random.below(2)))
           : kind == 2 ? std::numeric_limits<position_t>::min()
           : kind == 3
               ? std::numeric_limits<position_t>::max()
               : static_cast<position_t>(random.below(to_size(std::max<index_t>(cache_slots, 1))));
  }
  return slots;
}

TEMPLATE_LIST_TEST_CASE(
    "prefetch: the list is the distinct slots, ascending, and the plan its rows", "[prefetch]",
    test::Executors) {
  TestType const x{};
  // Caches around the words of 32 slots and the parts of 8192.
  for (index_t const cache_slots : {0, 1, 31, 32, 33, 64, 8191, 8192, 8193, 40000}) {
    for (index_t const rows : {0, 1, 3}) {
      for (index_t const top_k : {1, 40, 300}) {
        check_plan(x, rows, top_k, cache_slots,
                   random_slots(to_size(rows * top_k), cache_slots,
                                static_cast<std::uint64_t>(cache_slots + rows)),
                   top_k == 40 ? 700 : 0);
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("prefetch: nothing selected, everything selected, one slot by all",
                        "[prefetch]", test::Executors) {
  TestType const x{};
  check_plan(x, 2, 5, 100, Numbers(10, no_position));
  check_plan(x, 4, 70, 9000, Numbers(280, 8999));
  Numbers all(9000);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<position_t>(8999 - i);
  check_plan(x, 30, 300, 9000, all);
  check_plan(x, 30, 300, 8999, all);
}

TEMPLATE_LIST_TEST_CASE("INT: prefetch from a cache of 10 M slots", "[prefetch]", test::Executors) {
  index_t const cache_slots = 10'000'019;  // more words than parts: a part takes several rounds
  check_plan(TestType{}, 4, 500, cache_slots, random_slots(2000, cache_slots, 5));
}

// ---- shared layers on staging caches

/// A cache of the format of another, whose contents are NaN.
template <class Format>
class Staging {
 public:
  Staging(PrefetchList<space> const& list, test::PagedCache<Format> const& like)
      : cache_({1, list.blocks() * list.page_size, like.lanes(), list.page_size, 0},
               format_of(like)) {}

  auto writable() {
    auto const view = cache_.view();
    return MutableCacheView<space, Format>{
        cache_.memory().data(), view.blocks,     view.block_size, view.lanes,
        view.block_stride,      view.row_stride, view.format};
  }
  CacheView<space, Format> view() const { return cache_.view(); }
  bool intact() { return cache_.memory().intact(); }

 private:
  static Format format_of(test::PagedCache<Format> const& like) { return like.view().format; }
  test::PagedCache<Format> cache_;
};

/// A session whose shared layers read staging caches.
template <class X, class M>
struct Prefetched {
  using Format = typename decltype(std::declval<M&>().kv(0).view())::format_type;
  using Staged = Staging<Format>;

  X x;
  M& model;
  Session<X, M, Schedule>& session;
  OwnedList list;
  std::vector<std::unique_ptr<Staged>> staging{};

  Prefetched(X exec, M& m, Session<X, M, Schedule>& s, index_t page_size)
      : x(exec),
        model(m),
        session(s),
        list(prefetch_capacity(Rows{s.row_count()}, TopK{m.shape.top_k}, m.kv(0).slots()),
             page_size) {
    for (std::int32_t number = 0; number < m.layers(); ++number) {
      staging.push_back(std::make_unique<Staged>(list.get(), m.kv(number)));
    }
  }
  Status plan() { return ::plan(x, model.kv(0).slots(), session.state(), list.get()); }
  Status copy(std::int32_t number) {
    Status const status = copy_rows(x, model.kv(number).view(), SlotView<space>(list.get().slots),
                                    staging[to_size(number)]->writable(), SlotView<space>{});
    test::finish(x);
    return status;
  }
  auto inputs(std::int32_t number) {
    auto in = session.inputs(number);
    in.attention.kv = staging[to_size(number)]->view();
    in.batch.kv_pages = list.get().pages(in.batch.kv_pages);
    return in;
  }
};

template <class X, class M>
void check_staged(X const& x, M& model, RowList const& rows, index_t page_size) {
  CAPTURE(page_size, rows.size());
  Session direct(x, model, Schedule("FSS"), rows);
  direct.run_all();
  Session session(x, model, Schedule("FSS"), rows);
  REQUIRE_THAT(session.run(0), succeeded());
  auto const selected = copy_selection(session.state().selection());
  Prefetched<X, M> prefetched(x, model, session, page_size);
  REQUIRE_THAT(prefetched.plan(), succeeded());
  for (std::int32_t const number : {1, 2}) {
    REQUIRE_THAT(prefetched.copy(number), succeeded());
    REQUIRE_THAT(session.run(number, prefetched.inputs(number)), succeeded());
    CHECK(session.result(number) == direct.result(number));
    CHECK(prefetched.staging[to_size(number)]->intact());
  }
  CHECK(copy_selection(session.state().selection()) == selected);
  // and back
  REQUIRE_THAT(plan_group(x, session.batch(), session.state()), succeeded());
  REQUIRE_THAT(session.run(1), succeeded());
  CHECK(session.result(1) == direct.result(1));
}

using Float = Model<>;
using Bf16 = Model<bf16, format::Plain<bf16>, format::Plain<bf16>>;
using Half = Model<fp16, format::Plain<fp16>, format::Plain<fp16>>;
using Mixed = Model<bf16, format::IndexKeyE4m3, format::LatentE4m3>;
using Fp8Queries = Model<e4m3, format::IndexKeyE4m3, format::LatentE4m3>;

/// Two requests with one prefix, a page that lies nowhere.
template <class M>
void share_pages(M& model) {
  model.kv(0).entry(1, 0) = model.kv(0).entry(0, 0);
  model.kv(0).entry(3, 1) = model.kv(0).entry(0, 1);
  model.kv(0).unmap(3, 3);
}

/// Prefill chunks and decode rows; drafts of two requests; nothing visible, beside k and below it.
std::vector<RowList> row_lists() {
  return {mixed_rows(),
          join({chunk(0, 29, 4), chunk(3, 40, 4)}),
          join({{{1, 0}}, chunk(2, 3), {{0, 0}}, chunk(1, 6), chunk(1, 7)}),
          {{2, 0}},
          {}};
}

template <class X, class M>
void check_all(Shape const& shape, index_t kv_page, std::vector<index_t> const& staging_pages) {
  M model(Schedule("FSS"), 3, shape, {4, kv_page, 1});
  if (kv_page > 0) share_pages(model);
  for (RowList const& rows : row_lists()) {
    for (index_t const page_size : staging_pages) check_staged(X{}, model, rows, page_size);
  }
}

TEMPLATE_LIST_TEST_CASE("prefetch: shared layers on staging caches give the bits of the KV caches",
                        "[prefetch]", test::Executors) {
  for (index_t const kv_page : {0, 1, 8})
    check_all<TestType, Float>(small_shape, kv_page, {1, 8, 64});
}

TEMPLATE_LIST_TEST_CASE("prefetch: staging in every cache format", "[prefetch]", test::Executors) {
  check_all<TestType, Bf16>(published_shape, 8, {16});
  check_all<TestType, Half>(published_shape, 8, {8});
  check_all<TestType, Mixed>(published_shape, 8, {64});
  check_all<TestType, Fp8Queries>(published_shape, 8, {1});
}

TEMPLATE_LIST_TEST_CASE("MTP: a draft step's selection is prefetched like any other", "[prefetch]",
                        test::Executors) {
  TestType const x{};
  Float model(Schedule("FSS"), 3);
  Session first(x, model, Schedule("FSS"), join({chunk(0, 29, 3), chunk(1, 37, 3)}));
  REQUIRE_THAT(first.run(0), succeeded());
  auto const last = test::guarded<position_t>({1, 5});
  auto const drafts = [&](bool staged) {
    Session step(x, model, Schedule("FSS"), join({chunk(0, 29), chunk(1, 37)}), {8, 3});
    REQUIRE_THAT(compact_selection(x, first.state(), first.id(), numbers(last), step.id(),
                                   step.batch(), step.state()),
                 succeeded());
    Prefetched<TestType, Float> prefetched(x, model, step, 8);
    if (staged) {
      REQUIRE_THAT(prefetched.plan(), succeeded());
      REQUIRE_THAT(prefetched.copy(1), succeeded());
    }
    REQUIRE_THAT(step.run(1, staged ? prefetched.inputs(1) : step.inputs(1)), succeeded());
    return step.result(1);
  };
  CHECK(drafts(true) == drafts(false));
}

TEMPLATE_LIST_TEST_CASE("prefetch: the list before the full layer attends, in steps of its run",
                        "[prefetch]", test::Executors) {
  TestType const x{};
  Float model(Schedule("FSS"), 3);
  Session direct(x, model, Schedule("FSS"), mixed_rows());
  direct.run_all();

  Session session(x, model, Schedule("FSS"), mixed_rows());
  Prefetched<TestType, Float> prefetched(x, model, session, 8);
  auto const layer = session.layer(0);
  auto const in = session.inputs(0);
  Rows const rows{session.row_count()};
  test::Guarded<position_t> indices(to_size(rows.n * layer.shape.top_k)), counts(to_size(rows.n));
  auto const chosen =
      make_selection<space>(indices.data(), counts.data(), rows, TopK{layer.shape.top_k});
  REQUIRE_THAT(select(x, layer.indexer, layer.topk, *in.indexer, in.batch, layer.shape, chosen,
                      session.workspace()),
               succeeded());
  OwnedState near(rows.n, layer.shape.top_k);
  for (SelectionState<space>* const state : {&near.get(), &session.state()}) {
    REQUIRE_THAT(import_selection(x, {chosen.indices, chosen.counts}, in.id, 0, in.batch, *state),
                 succeeded());
  }
  REQUIRE_THAT(prefetched.plan(), succeeded());
  REQUIRE_THAT(prefetched.copy(1), succeeded());  // beside the following, from here on
  REQUIRE_THAT(
      attention_run(x, layer.attention, in.attention, in.batch, {0, rows.n}, near.get().plan(),
                    session.outputs(0), layer.shape, session.workspace()),
      succeeded());
  REQUIRE_THAT(session.run(1, prefetched.inputs(1)), succeeded());
  CHECK(session.result(0) == direct.result(0));
  CHECK(session.result(1) == direct.result(1));
}

// ---- tokens that are appended after the copy

TEMPLATE_LIST_TEST_CASE("PAGE: rows appended after the copy are found and brought in", "[prefetch]",
                        test::Executors) {
  TestType const x{};
  index_t const kv_page = GENERATE(0, 8);
  Float model(Schedule("FSS"), 3, small_shape, {4, kv_page, 1});
  Session session(x, model, Schedule("FSS"), join({chunk(0, 29, 2), chunk(3, 40)}));
  Prefetched<TestType, Float> prefetched(x, model, session, 8);
  REQUIRE_THAT(session.run(0), succeeded());
  REQUIRE_THAT(prefetched.plan(), succeeded());
  REQUIRE_THAT(prefetched.copy(1), succeeded());

  // Selected tokens of both requests, a third request's, and positions that lie nowhere.
  Selected const selected = session.selected(0);
  auto const positions = test::guarded<position_t>(
      {selected.row(0).front(), selected.row(1).back(), selected.row(2).back(), 5, 30000, -1});
  auto const requests = test::guarded<position_t>({0, 0, 3, 1, 0, 1});
  test::Guarded<position_t> slots(6, test::unwritten), rows(6, test::unwritten);
  auto const vector = [](test::Guarded<position_t>& values) {
    return make_dense<space, position_t, 1>(values.data(), {static_cast<index_t>(values.size())});
  };
  REQUIRE_THAT(appended_rows(x, prefetched.list.get(), numbers(positions), numbers(requests),
                             model.kv_pages(), vector(slots), vector(rows)),
               succeeded());
  test::finish(x);
  Numbers const listed = prefetched.list.slots();
  for (std::size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    position_t const slot = i < 4 ? model.kv(0).slot(requests[i], positions[i]) : no_position;
    CHECK(slots[i] == slot);
    auto const end = listed.begin() + prefetched.list.count();
    auto const at = std::find(listed.begin(), end, slot);
    CHECK(rows[i] == (at == end ? no_position : static_cast<position_t>(at - listed.begin())));
  }
  CHECK((rows[0] != no_position && rows[1] != no_position && rows[2] != no_position));
  CHECK((slots.intact() && rows.intact()));

  // New rows of layer 1 at these positions, then the same by a run without staging.
  for (std::size_t i = 0; i < 4; ++i) {
    append(x, model.kv(1), model.kv_pages(), requests[i], positions[i],
           token_values(Part::kv, 9, requests[i], positions[i], model.shape.key_dim));
  }
  auto const stale = [&] {
    REQUIRE_THAT(session.run(1, prefetched.inputs(1)), succeeded());
    return session.result(1);
  }();
  REQUIRE_THAT(copy_rows(x, model.kv(1).view(), SlotView<space>(vector(slots)),
                         prefetched.staging[1]->writable(), SlotView<space>(vector(rows))),
               succeeded());
  REQUIRE_THAT(session.run(1, prefetched.inputs(1)), succeeded());
  Session direct(x, model, Schedule("FSS"), join({chunk(0, 29, 2), chunk(3, 40)}));
  direct.run_all();
  CHECK(session.result(1) == direct.result(1));
  CHECK_FALSE(stale == direct.result(1));
}

// ---- mistakes

TEMPLATE_LIST_TEST_CASE(
    "SHARE-STALE: a staged plan and a whole KV cache do not meet, nor the reverse", "[prefetch]",
    test::Executors) {
  TestType const x{};
  index_t const kv_page = GENERATE(0, 8);
  Float model(Schedule("FSSF"), 4, small_shape, {4, kv_page, 1});
  Session session(x, model, Schedule("FSSF"), mixed_rows());
  Prefetched<TestType, Float> prefetched(x, model, session, 8);
  REQUIRE_THAT(session.run(0), succeeded());
  index_t const staging_slots = prefetched.list.get().blocks() * 8;

  // Staging caches, but the plan was never staged.
  CHECK_THAT(
      session.run(1, prefetched.inputs(1)),
      refused(Errc::stale_selection, "call plan_prefetch first").at(1).naming(0, staging_slots));

  REQUIRE_THAT(prefetched.plan(), succeeded());
  CHECK_THAT(
      session.run(1),
      refused(Errc::stale_selection, "call plan_group first").at(1).naming(staging_slots, 0));
  // The batch is right, the cache was forgotten.
  auto in = prefetched.inputs(1);
  in.attention.kv = model.kv(1).view();
  CHECK_THAT(session.run(1, in), refused(Errc::bad_shape, "block size of the KV cache").at(1) ||
                                     refused(Errc::bad_shape, "slots of the KV cache")
                                         .at(1)
                                         .naming(staging_slots, model.kv(1).slots()));
  // The list of another batch.
  Prefetched<TestType, Float> other(x, model, session, 8);
  CHECK_THAT(session.run(1, other.inputs(1)), refused(Errc::stale_selection, "kv_pages").at(1));
  CHECK(session.untouched_outputs(1));
  // Twice, which would list rows of staging caches.
  CHECK_THAT(prefetched.plan(), refused(Errc::stale_selection, "already").naming(0, staging_slots));

  // Where positions are mapped a staging table has no business.
  auto full = session.inputs(3);
  full.batch.kv_pages = prefetched.inputs(1).batch.kv_pages;
  CHECK_THAT(session.run(3, full),
             refused(Errc::bad_value, "staging").at(3).naming(0, staging_slots));
  full = session.inputs(3);
  full.batch.index_pages = prefetched.inputs(1).batch.kv_pages;
  CHECK_THAT(session.run(3, full), refused(Errc::bad_value, "staging").at(3));
  CHECK_THAT(plan_group(x, prefetched.inputs(1).batch, session.state()),
             refused(Errc::bad_value, "staging"));
  OwnedState next(model.shape.rows, model.shape.top_k);
  CHECK_THAT(import_selection(x, session.state().selection(), {8, 0}, 0, prefetched.inputs(1).batch,
                              next.get()),
             refused(Errc::bad_value, "staging"));
  auto const row = test::guarded(std::vector<float>(to_size(model.shape.key_dim)));
  auto const zero = test::guarded<position_t>({0});
  CHECK_THAT(append_rows(x, make_dense<space, float const, 2>(row.data(), {1, model.shape.key_dim}),
                         numbers(zero), numbers(zero), prefetched.inputs(1).batch.kv_pages,
                         prefetched.staging[1]->writable()),
             refused(Errc::bad_value, "staging"));
  CHECK(session.untouched_outputs(3));

  // None of this harmed the plan, and the next group starts without staging.
  REQUIRE_THAT(session.run(1, prefetched.inputs(1)), succeeded());
  REQUIRE_THAT(session.run(3), succeeded());
  CHECK(session.state().plan_pages().staging_slots == 0);
}

TEMPLATE_LIST_TEST_CASE("SHARE-STALE: dense layers do not read staging caches", "[prefetch]",
                        test::Executors) {
  TestType const x{};
  Float model(Schedule("FSS"), 3);
  Session sparse(x, model, Schedule("FSS"), mixed_rows());
  Prefetched<TestType, Float> prefetched(x, model, sparse, 8);
  REQUIRE_THAT(sparse.run(0), succeeded());
  REQUIRE_THAT(prefetched.plan(), succeeded());
  Session dense(x, model, Schedule("FSS"), mixed_rows(), {7, 3}, ample, 0, DensePolicies<Float>{});
  auto in = dense.inputs(1);
  in.attention.kv = prefetched.inputs(1).attention.kv;
  in.batch.kv_pages = prefetched.inputs(1).batch.kv_pages;
  CHECK_THAT(dense.run(1, in), refused(Errc::bad_value, "staging").at(1));
  CHECK(dense.untouched_outputs(1));
}

TEMPLATE_LIST_TEST_CASE("prefetch: refusals name what is wrong and change nothing", "[prefetch]",
                        test::Executors) {
  TestType const x{};
  index_t const cache_slots = 100;
  Numbers const slots(2 * 30, 7);
  PlannedState state(2, 30, slots);
  OwnedList owned(60, 4);
  PrefetchList<space> const good = owned.get();
  test::Scratch scratch(prefetch_workspace(x, cache_slots));
  auto const try_list = [&](PrefetchList<space> const& list, index_t cache = 100) {
    return plan_prefetch(x, cache, state.get(), list, scratch.get());
  };
  auto const with = [&](auto const& change) {
    PrefetchList<space> list = good;
    change(list);
    return list;
  };
  auto const dense = [](position_t* data, index_t count) {
    return make_dense<space, position_t, 1>(data, {count});
  };
  CHECK_THAT(try_list(with([&](auto& l) { l.slots = dense(l.slots.data_handle(), 59); })),
             refused(Errc::bad_shape, "capacity of the prefetch list").naming(60, 59));
  CHECK_THAT(try_list(with([&](auto& l) { l.slots = dense(l.slots.data_handle(), 39); }), 40),
             refused(Errc::bad_shape, "capacity of the prefetch list").naming(40, 39));
  CHECK_THAT(try_list(with([&](auto& l) { l.slots = dense(l.slots.data_handle(), 0); }), 0),
             refused(Errc::bad_shape, "capacity of the prefetch list").naming(1, 0));
  CHECK_THAT(try_list(with([](auto& l) { l.page_size = 0; })),
             refused(Errc::bad_shape, "page size of the staging caches").naming(1, 0));
  CHECK_THAT(try_list(with([](auto& l) { l.page_size = max_position + 1; })),
             refused(Errc::bad_shape, "page size of the staging caches"));
  CHECK_THAT(try_list(with([&](auto& l) {
               l.slots = dense(l.slots.data_handle(), max_position);
               l.page_size = 64;
             })),
             refused(Errc::bad_shape, "rows of the staging caches"));
  CHECK_THAT(try_list(with([&](auto& l) { l.count = dense(l.count.data_handle(), 2); })),
             refused(Errc::bad_shape, "counts of the prefetch list").naming(1, 2));
  CHECK_THAT(try_list(with([&](auto& l) { l.count = dense(nullptr, 1); })),
             refused(Errc::missing_input, "count of the prefetch list"));
  CHECK_THAT(try_list(with([&](auto& l) { l.slots = dense(nullptr, 60); })),
             refused(Errc::missing_input, "slots of the prefetch list"));
  CHECK_THAT(try_list(good, -1), refused(Errc::bad_shape, "slots of the KV caches").naming(0, -1));
  CHECK_THAT(try_list(good, max_position + 1), refused(Errc::bad_shape, "slots of the KV caches"));
  auto small = scratch.get();
  small.bytes -= 256;
  CHECK_THAT(plan_prefetch(x, cache_slots, state.get(), good, small),
             refused(Errc::workspace_too_small, "plan_prefetch")
                 .naming(static_cast<std::int64_t>(scratch.get().bytes),
                         static_cast<std::int64_t>(small.bytes)));
  test::finish(x);
  CHECK(state.slots() == slots);
  CHECK(owned.slots() == Numbers(60, test::unwritten_value<position_t>()));
  state.get().clear();
  CHECK_THAT(try_list(good), refused(Errc::stale_selection, "without a selection"));

  auto const numbers_of = [&](index_t count) {
    return LengthView<space>(dense(good.slots.data_handle(), count));
  };
  auto const table = make_contiguous_table<space>(Keys{100});
  auto const out = dense(good.slots.data_handle(), 3);
  CHECK_THAT(appended_rows(x, good, numbers_of(3), numbers_of(2), table, out, out),
             refused(Errc::bad_shape, "requests of the appended tokens").naming(3, 2));
  CHECK_THAT(appended_rows(x, good, numbers_of(2), numbers_of(2), table, out, out),
             refused(Errc::bad_shape, "slots of the appended tokens").naming(2, 3));
  CHECK_THAT(appended_rows(x, good, numbers_of(3), numbers_of(3), good.pages(table), out, out),
             refused(Errc::bad_value, "staging"));
}

TEST_CASE("prefetch: sizes grow with the cache, and saturate", "[prefetch]") {
  auto const x = ReferenceExec{};
  std::size_t last = 0;
  for (index_t slots = 0; slots < 5000; slots += 7) {
    auto const bytes = prefetch_workspace(x, slots).bytes;
    CHECK(bytes >= last);
    last = bytes;
  }
  CHECK(prefetch_workspace(x, index_t{1} << 20).bytes == (std::size_t{1} << 18) + 4096);
  CHECK(prefetch_workspace(x, max_position).bytes < std::size_t{1} << 30);
  CHECK(prefetch_workspace(x, -5).bytes == prefetch_workspace(x, 0).bytes);
  CHECK(prefetch_capacity(Rows{8192}, TopK{2048}, max_position) == index_t{8192} * 2048);
  CHECK(prefetch_capacity(Rows{8192}, TopK{2048}, 1 << 20) == 1 << 20);
  CHECK(prefetch_capacity(Rows{0}, TopK{2048}, 1 << 20) == 1);
}

}  // namespace
