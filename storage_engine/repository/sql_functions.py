"""The functions that SQL of users may call: those that compute from their arguments alone.

Everything that is not listed is refused, so that what a later DuckDB brings stays out until
somebody has looked at it; a test compares the lists with the DuckDB that is installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Rows out of arguments. Files, settings, secrets and catalogs are read by table functions, too.
TABLE_FUNCTIONS = frozenset({"generate_series", "json_each", "range", "unnest"})

_BY_THE_PARSER = "unnest !__postfix"  # made of syntax, or without a name of their own

# Not among them, though they only compute: functions that follow JSON as deep as it goes (such as
# json_structure, json_transform, and the table function json_tree), and those of VARIANT, which
# does. A stored text of 200,000 brackets ends the process in them.
_ALLOWED = """
abs acos acosh add age aggregate ago alias any_value apply approx_count_distinct approx_quantile
approx_top_k arbitrary arg_max arg_max_null arg_max_nulls_last arg_min arg_min_null
arg_min_nulls_last argmax argmin array_agg array_aggr array_aggregate array_append array_apply
array_cat array_concat array_contains array_cosine_distance array_cosine_similarity
array_cross_product array_distance array_distinct array_dot_product array_extract array_filter
array_grade_up array_has array_has_all array_has_any array_indexof array_inner_product
array_intersect array_length array_negative_dot_product array_negative_inner_product
array_pop_back array_pop_front array_position array_prepend array_push_back array_push_front
array_reduce array_resize array_reverse array_reverse_sort array_select array_slice array_sort
array_to_json array_to_string array_to_string_comma_default array_transform array_unique
array_value array_where array_zip ascii asin asinh atan atan2 atanh avg bar base64 bin bit_and
bit_count bit_length bit_or bit_position bit_xor bitstring bitstring_agg bool_and bool_or
can_cast_implicitly cardinality cast_to_type cbrt ceil ceiling century char_length
character_length chr combine concat concat_ws constant_or_null contains corr cos cosh cot count
count_if count_star countif covar_pop covar_samp create_sort_key cume_dist current_date
current_localtime current_localtimestamp damerau_levenshtein date_add date_diff date_part
date_sub date_trunc datediff datepart datesub datetrunc day dayname dayofmonth dayofweek
dayofyear days_in_month decade decode degrees dense_rank divide editdist3 element_at encode
ends_with entropy enum_code enum_first enum_last enum_range enum_range_boundary epoch epoch_ms
epoch_ns epoch_us equi_width_bins era error even exp factorial favg fdiv fill filter finalize
first first_value flatten floor fmod format formatReadableDecimalSize formatReadableSize
format_bytes from_base64 from_binary from_hex fsum gamma gcd gen_random_uuid generate_series
generate_subscripts geomean geometric_mean get_bit get_current_time get_current_timestamp
get_type grade_up greatest greatest_common_divisor group_concat hamming hash hex histogram
histogram_exact hour icu_sort_key ilike_escape instr is_histogram_other_bin isfinite isinf isnan
isodow isoyear jaccard jaro_similarity jaro_winkler_similarity json json_array json_array_length
json_exists json_extract json_extract_path json_extract_path_text json_extract_string
json_group_array json_group_object json_keys json_object json_pretty json_quote json_type
json_valid json_value julian kahan_sum kurtosis kurtosis_pop lag last last_day last_value lcase
lcm lead least least_common_multiple left left_grapheme len length length_grapheme levenshtein
lgamma like_escape list list_aggr list_aggregate list_any_value list_append list_apply
list_approx_count_distinct list_avg list_bit_and list_bit_or list_bit_xor list_bool_and
list_bool_or list_cat list_concat list_contains list_cosine_distance list_cosine_similarity
list_count list_distance list_distinct list_dot_product list_element list_entropy list_extract
list_filter list_first list_grade_up list_has list_has_all list_has_any list_histogram
list_indexof list_inner_product list_intersect list_kurtosis list_kurtosis_pop list_last
list_mad list_max list_median list_min list_mode list_negative_dot_product
list_negative_inner_product list_pack list_position list_prepend list_product list_reduce
list_resize list_reverse list_reverse_sort list_select list_sem list_skewness list_slice
list_sort list_stddev_pop list_stddev_samp list_string_agg list_sum list_transform list_unique
list_value list_var_pop list_var_samp list_where list_zip listagg ln log log10 log2 lower lpad
ltrim mad make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns
make_timestamptz map map_concat map_contains map_contains_entry map_contains_value
map_entries map_extract map_extract_value map_from_entries map_keys map_values max max_by md5
md5_number md5_number_lower md5_number_upper mean median microsecond millennium millisecond min
min_by minute mismatches mod mode month monthname multiply nanosecond nextafter nfc_normalize
normalized_interval not_ilike_escape not_like_escape now nth_value ntile nullif octet_length ord
parse_dirname parse_dirpath parse_filename parse_formatted_bytes parse_path percent_rank
pg_size_pretty pg_typeof pi position pow power prefix printf product quantile quantile_cont
quantile_disc quarter radians random range rank rank_dense reduce regexp_escape regexp_extract
regexp_extract_all regexp_full_match regexp_matches regexp_replace regexp_split_to_array
regexp_split_to_table regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx
regr_sxy regr_syy remap_struct repeat replace replace_type reservoir_quantile reverse right
right_grapheme round round_even roundbankers row row_number row_to_json rpad rtrim second sem
set_bit sha1 sha256 sign signbit sin sinh skewness split split_part sqrt st_asbinary st_astext
st_aswkb st_aswkt st_crs st_geomfromwkb st_intersects_extent st_setcrs starts_with stddev
stddev_pop stddev_samp str_split str_split_regex strftime string_agg string_split
string_split_regex string_to_array strip_accents strlen strpos strptime struct_concat
struct_contains struct_extract struct_extract_at struct_has struct_indexof struct_insert
struct_keys struct_pack struct_position struct_update struct_values substr substring
substring_grapheme subtract suffix sum sum_no_overflow sumkahan switch tan tanh time_bucket
timetz_byte_comparable timezone timezone_hour timezone_minute to_base to_base64 to_binary
to_centuries to_days to_decades to_hex to_hours to_json to_microseconds to_millennia
to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp to_weeks to_years today
transaction_timestamp translate trim trunc try_strptime typeof ucase unbin unhex unicode
union_extract union_tag union_value unpivot_list upper url_decode url_encode uuid
uuid_extract_timestamp uuid_extract_version uuidv4 uuidv7 var_pop var_samp variance

vector_type version wavg week weekday weekofyear weighted_avg xor year yearweek
"""

# What makes a value as long as an argument says, or many times as long as its arguments. DuckDB's
# memory limit counts neither texts nor lists while these make them, so that macros of the same
# names bound them: by parameters, what a value would be of. (What `||`, concat, aggregates and
# ranges of times make it does count.)
LONGEST_MADE = 1_000_000
LONGEST_REWRITTEN = 10_000_000  # at most, of a regular expression: nobody knows before
_ANY_STEP = (
    "abs(TRY_CAST(made.stop::VARCHAR AS HUGEINT) - TRY_CAST(made.start::VARCHAR AS HUGEINT)) // "
    "greatest(1, abs(TRY_CAST(made.step::VARCHAR AS HUGEINT)))"
)
_REPLACED = (
    f"CASE WHEN strlen(made.text) * strlen(made.target) <= {LONGEST_MADE} THEN 0 "
    "ELSE strlen(made.text) + (strlen(made.text) - "
    "strlen(system.main.replace(made.text, made.source, ''))) // greatest(strlen(made.source), 1) "
    "* (strlen(made.target) - strlen(made.source)) - "
    f"greatest(strlen(made.text) - {LONGEST_MADE}, 0) END"  # long as it is, it may stay so
)
_BOUNDED: dict[str, dict[str, str]] = {
    "repeat": {"value, times": "strlen(made.value::VARCHAR) * made.times"},
    "lpad": {"text, length, fill": "made.length"},
    "rpad": {"text, length, fill": "made.length"},
    "bitstring": {"bits, length": "made.length"},
    "list_resize": {"list, length": "made.length", "list, length, fill": "made.length"},
    "array_resize": {"list, length": "made.length", "list, length, fill": "made.length"},
    "range": {
        "stop": "made.stop",
        "start, stop": "made.stop - made.start",
        "start, stop, step": _ANY_STEP,
    },
    "replace": {"text, source, target": _REPLACED},
}
_BOUNDED["generate_series"] = _BOUNDED["range"]
# Of `regexp_replace`. DuckDB wants them as constants, so that the macro has a branch for each.
_OPTIONS = ("g", "i", "gi", "ig", "c", "gc", "cg", "s", "gs", "sg", "m", "gm", "mg")


def bounding_macros() -> list[str]:
    """To be run on the instance that is to run SQL of users.

    A macro's parameters are put into its body as they are written, however often it has them, and
    calls are nested: so each is there once, as a member of a struct that a lambda gets.
    """
    statements = []
    for name, overloads in _BOUNDED.items():
        bodies = []
        for parameters, size in overloads.items():
            names = parameters.split(", ")
            call = f"{name}({', '.join(f'made.{parameter}' for parameter in names)})"
            bodies.append(_body(parameters, names, size, LONGEST_MADE, call))
        statements.append(f"CREATE MACRO {name} {', '.join(bodies)}")
    return [*statements, _rewriting_macro()]


def _rewriting_macro() -> str:
    """The pattern stays outside the lambda, as it is compiled once where it is a constant."""
    size = "(strlen(made.text) + 1) * strlen(made.target)"
    members, call = ["text", "target"], "regexp_replace(made.text, pattern, made.target"
    first = _body("text, pattern, target", members, size, LONGEST_REWRITTEN, f"{call})")
    branches = " ".join(
        f"WHEN '{options}' THEN system.main.{call}, '{options}')" for options in _OPTIONS
    )
    unknown = f"error('regexp_replace: its options are one of {', '.join(_OPTIONS)}')"
    chosen = f"CASE options {branches} ELSE {unknown} END"
    every = _body(
        "text, pattern, target, options", members, size, LONGEST_REWRITTEN, f"{call})", chosen
    )
    return f"CREATE MACRO regexp_replace {first}, {every}"


def _body(
    parameters: str,
    members: Sequence[str],
    size: str,
    longest: int,
    call: str,
    made: str | None = None,
) -> str:
    """`made`: what the value is, where that is not the system's function called so."""
    name = call.partition("(")[0]
    refusal = f"error('{name}: a value of more than {longest:,} characters or members')"
    given = ", ".join(f"'{member}': {member}" for member in members)
    return (
        f"({parameters}) AS list_transform([{{{given}}}], lambda made: "
        f"CASE WHEN {size} > {longest} THEN {refusal} ELSE {made or f'system.main.{call}'} END)[1]"
    )


_WIDE = re.compile(r"\d{4}|\{[^{}]*\{|%[^a-zA-Z%]*\*")
_PLACES = 100


def is_bounded_pattern(pattern: str) -> bool:
    """Whether a pattern of `format` or `printf` says of itself how long its result can be: no
    places wider than 999, none whose width is an argument, and not too many places."""
    return not _WIDE.search(pattern) and len(re.findall(r"[{%]", pattern)) <= _PLACES


PATTERNS = frozenset({"format", "printf"})


def is_bounded(name: str) -> bool:
    """Whether a macro stands before a function, so that its schema must not be named."""
    return name.lower() in _BOUNDED or name.lower() == "regexp_replace"


COLLATIONS = "icu_collate_"  # begins the functions that ICU has for each language

FUNCTIONS = frozenset(f"{_ALLOWED} {_BY_THE_PARSER}".lower().split())


def is_allowed(name: str) -> bool:
    """Whether a function computes from its arguments and nothing else. Operators do."""
    name = name.lower()
    if name in FUNCTIONS or name.startswith(COLLATIONS):
        return True
    return not any(letter.isalnum() or letter == "_" for letter in name)
