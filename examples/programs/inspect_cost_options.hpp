// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <indexshare/accounting.hpp>
#include <indexshare/dims.hpp>
#include <indexshare/io/config.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.hpp"
#include "inspect_costs.hpp"

namespace programs {

/// A word that an option takes and what it stands for.
template <class T>
struct NamedForm {
  std::string_view name;
  T form;
};

inline constexpr NamedForm<indexshare::KvForm> kv_form_names[] = {
    {"fp8-656", indexshare::KvForm::latent_e4m3},
    {"fp8-576", indexshare::KvForm::e4m3},
    {"bf16", indexshare::KvForm::bf16},
};
inline constexpr NamedForm<indexshare::IndexKeyForm> index_key_form_names[] = {
    {"fp8", indexshare::IndexKeyForm::e4m3},
    {"f16", indexshare::IndexKeyForm::f16},
};

template <class T>
std::string_view form_name(std::span<NamedForm<T> const> names, T form) {
  for (NamedForm<T> const& known : names)
    if (known.form == form) return known.name;
  return "unknown";
}
inline std::string_view form_name(indexshare::KvForm form) {
  return form_name<indexshare::KvForm>(kv_form_names, form);
}
inline std::string_view form_name(indexshare::IndexKeyForm form) {
  return form_name<indexshare::IndexKeyForm>(index_key_form_names, form);
}

inline std::string forms_text(CacheForms const& forms) {
  return std::string(form_name(forms.index_key)) + " index keys, " +
         std::string(form_name(forms.kv)) + " KV";
}

/// The form that the option's word stands for; the first one if the option is not given.
template <class T>
Parsed<T> parse_form(Arguments const& arguments, std::string_view option,
                     std::span<NamedForm<T> const> names) {
  if (!arguments.has(option)) return names[0].form;
  std::string const word = arguments.text(option);
  std::string expected;
  for (NamedForm<T> const& known : names) {
    if (known.name == word) return known.form;
    expected += (expected.empty() ? "" : ", ") + std::string(known.name);
  }
  return reject(option, "got " + programs::quoted(word) + ", expected one of " + expected);
}

inline Parsed<CacheForms> parse_cache_forms(Arguments const& arguments) {
  auto const kv = parse_form<indexshare::KvForm>(arguments, "--kv", kv_form_names);
  if (!kv) return cuda::std::unexpected(kv.error());
  auto const key =
      parse_form<indexshare::IndexKeyForm>(arguments, "--index-key", index_key_form_names);
  if (!key) return cuda::std::unexpected(key.error());
  return CacheForms{*kv, *key};
}

/// `A:B`, the tokens A to B - 1 of a sequence.
inline Parsed<indexshare::TokenRange> parse_prefill(std::string_view option,
                                                    std::string_view text) {
  constexpr std::int64_t longest = std::numeric_limits<indexshare::position_t>::max();
  if (text.find(':') == std::string_view::npos)
    return reject(option,
                  "got " + programs::quoted(text) + ", expected A:B, the tokens A to B - 1");
  auto const range = parse_range(option, text, longest);
  if (!range) return reject(option, range.error().problem);
  return indexshare::TokenRange{range->first, range->last};
}

/// `21,19.5`: numbers of full layers, at least one and at most one per layer.
inline Parsed<std::vector<double>> parse_indexers(std::string_view option, std::string_view text,
                                                  std::int32_t layers) {
  std::vector<double> counts;
  for (bool more = true; more;) {
    std::size_t const comma = text.find(',');
    auto const count = parse_number(option, text.substr(0, comma), 1, layers);
    if (!count) return reject(option, count.error().problem);
    counts.push_back(*count);
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
  }
  return counts;
}

/// A ratio with the digits it was published with: `2.9` is not `2.90`.
inline Parsed<indexshare::PublishedRatio> parse_published(std::string_view option,
                                                          std::string_view text) {
  std::size_t const point = text.find('.');
  std::size_t const digits = point == std::string_view::npos ? 0 : text.size() - point - 1;
  bool const plain = text.find_first_not_of("0123456789.") == std::string_view::npos;
  auto const value = parse_number(option, text, 1, 1000);
  if (!plain || !value || digits > 6)
    return reject(option, "got " + programs::quoted(text) +
                              ", expected a ratio from 1 to 1000 with at most 6 digits after the "
                              "point, such as 2.9");
  return indexshare::PublishedRatio{*value, static_cast<int>(digits)};
}

/// The accounting of that name, or all that can be counted.
inline Parsed<std::vector<indexshare::Accounting>> parse_accountings(std::string_view option,
                                                                     std::string_view text,
                                                                     double active_parameters) {
  std::vector<indexshare::Accounting> chosen;
  std::string expected = "all";
  for (indexshare::AccountingName const& known : indexshare::accounting_names) {
    expected += std::string(", ") + known.name;
    bool const lacks = needs_active_parameters(known.accounting) && active_parameters == 0;
    if (text == known.name && lacks)
      return reject("--active-parameters",
                    "missing, --accounting " + std::string(known.name) + " counts with them");
    if ((text == "all" && !lacks) || text == known.name) chosen.push_back(known.accounting);
  }
  if (chosen.empty())
    return reject(option, "got " + programs::quoted(text) + ", expected one of " + expected);
  return chosen;
}

/// Whether an option was given that asks for accountings.
inline bool asks_for_accountings(Arguments const& arguments) {
  return arguments.has("--accounting") || arguments.has("--published");
}

/// Precondition: asks_for_accountings(arguments).
inline Parsed<AccountingRequest> parse_accounting_request(Arguments const& arguments,
                                                          indexshare::SharePlan const& plan) {
  AccountingRequest request;
  request.indexers = usual_indexers(plan);
  if (arguments.has("--indexers")) {
    auto const counts =
        parse_indexers("--indexers", arguments.text("--indexers"), plan.num_layers());
    if (!counts) return cuda::std::unexpected(counts.error());
    request.indexers = *counts;
  }
  if (arguments.has("--active-parameters")) {
    auto const parameters =
        parse_number("--active-parameters", arguments.text("--active-parameters"), 1, 1e15);
    if (!parameters) return cuda::std::unexpected(parameters.error());
    request.active_parameters = *parameters;
  }
  if (arguments.has("--accounting")) {
    auto const chosen = parse_accountings("--accounting", arguments.text("--accounting"),
                                          request.active_parameters);
    if (!chosen) return cuda::std::unexpected(chosen.error());
    request.accountings = *chosen;
  }
  if (arguments.has("--published")) {
    auto const ratio = parse_published("--published", arguments.text("--published"));
    if (!ratio) return cuda::std::unexpected(ratio.error());
    request.published = *ratio;
  }
  return request;
}

}  // namespace programs
