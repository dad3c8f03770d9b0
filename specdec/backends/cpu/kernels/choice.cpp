// Chooses the tokens of rows of logits, with every setting of sampling: bias, penalties, bans, temperature, top-k,
// top-p, min-p and the noise of the position; and the exact log-sum-exp that log-probabilities are reported with.
// Reference: specdec.sampling (Rows.choose, processed, survivors, log_normaliser), in float64.
//
// Exactness contract: a token that is returned as certain is the reference's. Most of the arithmetic is float32 with
// bounds on its error; where the bounds do not decide (about one row in 10^5), the token is only a guess and the caller
// asks the reference. A guess is good enough for a draft.
//
// Filters keep a prefix of the tokens in the order (logit descending, id ascending), so each is one boundary in that
// order, and no row is ever sorted. Top-k finds its boundary among the few tokens above a bound that the largest logits
// of chunks give. Top-p bisects the logit until few tokens are left around the boundary, and sorts those; the number of
// tokens above does not matter. Then the noise is added: a token whose logit is too low for any noise costs one
// comparison.

#include <algorithm>
#include <limits>
#include <vector>

#include "noise.h"
#include "team.h"

namespace specdec {

// As in pruned.py and tape.cpp; every field has 8 bytes.
struct Choice {
    double temperature, top_p, min_p, repetition, presence, frequency;
    int64_t top_k, seed;
    const int32_t* bias_ids;
    const double* bias;
    int64_t biases;
    const int32_t* banned;
    int64_t bans;
    const int32_t* ends;
    int64_t end_count;
    // of the pass: the distinct tokens before it, how often each was generated, and the tokens drafted after those
    const int32_t* seen;
    const int32_t* generated;
    int64_t seen_count;
    const int64_t* drafted;
    int64_t first;      // how many of them are before row 0
    int64_t position;   // of the token that row 0 decides
    int64_t end_after;  // end tokens are banned at positions below this
};

constexpr int64_t NOTHING = std::numeric_limits<int64_t>::min();  // no token is allowed; else ~token is a guess
constexpr int64_t NOT_FINITE = NOTHING + 1;                       // a NaN or +infinity among the logits

constexpr float MOST_NOISE = 22.9f;    // of a 32-bit word; the least is -3.2
constexpr float NOISE_ERROR = 1e-5f;   // of gumbel() in float32
constexpr float HOPELESS = 27;         // nats below the best logit: no noise helps
constexpr double MASS_ERROR = 2e-5;    // of a share of the probability, float32 exponentials
constexpr int64_t FEW = 256;           // tokens around the boundary of top-p that are sorted
constexpr size_t MOST_CONTENDERS = 256;

struct Token {
    double logit;  // before rounding to float32, if it is edited
    int32_t id;
};

INLINE bool before(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// --- edits: logits that differ from the row's --------------------------------------------------------------------------

struct Edit {
    int32_t id;
    int32_t generated = 0;
    double bias = 0;
    double value = 0;  // the edited logit
    bool has_bias = false, seen = false, banned = false;
};

// The edits of one row, by token. Kept by its thread, because looking up an id takes a table of the vocabulary.
class Edits {
  public:
    std::vector<Edit> all;

    // Raises nothing; ids outside the row are ignored, as only the caller's tables could hold them.
    void collect(const Choice& c, int64_t row, int64_t vocabulary) {
        vocabulary_ = vocabulary;
        for (int64_t i = 0; i < c.biases; ++i)
            if (Edit* e = at(c.bias_ids[i])) e->bias = c.bias[i], e->has_bias = true;
        if (c.repetition != 1 || c.presence != 0 || c.frequency != 0) {
            for (int64_t i = 0; i < c.seen_count; ++i)
                if (Edit* e = at(c.seen[i])) e->seen = true, e->generated = c.generated[i];
            for (int64_t i = 0; i < c.first + row; ++i)
                if (Edit* e = at(c.drafted[i])) e->seen = true, ++e->generated;
        }
        for (int64_t i = 0; i < c.bans; ++i)
            if (Edit* e = at(c.banned[i])) e->banned = true;
        if (c.position + row < c.end_after)
            for (int64_t i = 0; i < c.end_count; ++i)
                if (Edit* e = at(c.ends[i])) e->banned = true;
    }

    // The edit of an id, or null.
    Edit* of(int32_t id) { return all.empty() || !places_[id] ? nullptr : &all[places_[id] - 1]; }

    void clear() {
        for (const Edit& e : all) places_[e.id] = 0;
        all.clear();
    }

  private:
    std::vector<int32_t> places_;  // of each id in `all`, counted from 1; 0 between rows
    int64_t vocabulary_ = 0;

    Edit* at(int64_t id) {
        if (id < 0 || id >= vocabulary_) return nullptr;
        if ((int64_t)places_.size() < vocabulary_) places_.resize(vocabulary_);
        int32_t& place = places_[id];
        if (!place) {
            all.emplace_back();
            all.back().id = (int32_t)id;
            place = (int32_t)all.size();
        }
        return &all[place - 1];
    }
};

// The reference's operations in its order.
double edited(const Edit& e, float raw, const Choice& c) {
    double value = raw;
    if (e.has_bias) value += e.bias;
    if (e.seen && c.repetition != 1) value = value > 0 ? value / c.repetition : value * c.repetition;
    if (e.generated && (c.presence != 0 || c.frequency != 0)) value -= c.presence + c.frequency * e.generated;
    return e.banned ? -INFINITY : value;
}

// --- one row -----------------------------------------------------------------------------------------------------------

class Row {
  public:
    Row(const float* logits, const int32_t* ids, int64_t n, int64_t vocabulary, const Choice& choice, int64_t row)
        : x_(logits), ids_(ids), n_(n), choice_(choice), position_((uint32_t)(choice.position + row)) {
        edits_.collect(choice, row, vocabulary);
    }
    ~Row() { edits_.clear(); }

    int64_t token() {
        top_ = edits_.all.empty() ? largest() : edit();
        if (top_ != top_ || top_ == INFINITY) return NOT_FINITE;
        if (choice_.temperature == 0) return best();
        if (!(std::abs(top_) < 1e30)) return NOTHING;  // -infinity, or differences that float32 cannot hold
        scale_ = (float)(1 / choice_.temperature);
        const double size = std::abs(top_) / choice_.temperature + HOPELESS;
        rounding_ = 0x1p-50 * size + 1e-15;
        error_ = rounding_ + (edits_.all.empty() ? 0 : 0x1p-23 * size);
        filter();
        return drawn();
    }

  private:
    static thread_local Edits edits_;
    const float* x_;      // logits, edited ones rounded
    const int32_t* ids_;  // of a pruned row
    const int64_t n_;
    const Choice& choice_;
    const uint32_t position_;
    double top_ = 0;
    float scale_ = 0;
    double rounding_ = 0;  // of the reference's own (logit - top) / temperature
    double error_ = 0;     // of ours, where that is above -HOPELESS, beside the rounding of float32 operations
    // Boundaries: tokens up to `sure_` are kept; those after `maybe_` are not. Likewise the two logits for min-p.
    Token sure_{-INFINITY, INT32_MAX}, maybe_{-INFINITY, INT32_MAX};
    double sure_logit_ = -INFINITY, maybe_logit_ = -INFINITY;
    bool ties_ = true;  // whether the order of tokens next to the boundary is certain

    int32_t id(int64_t i) const { return ids_ ? ids_[i] : (int32_t)i; }

    // Replaces the edited logits in a copy of the row, rounded; at temperature 0 by -infinity, see best(). Returns the
    // best logit.
    double edit() {
        float* copy = scratch<7>(n_);
        std::memcpy(copy, x_, n_ * sizeof(float));
        const auto each = [&](const auto& body) {
            if (ids_) {
                for (int64_t i = 0; i < n_; ++i)
                    if (Edit* e = edits_.of(ids_[i])) body(i, *e);
            } else {
                for (Edit& e : edits_.all) body(e.id, e);
            }
        };
        double top = -INFINITY;
        for (Edit& e : edits_.all) e.value = -INFINITY;  // of a token that a pruned row lacks
        each([&](int64_t i, Edit& e) {
            e.value = edited(e, copy[i], choice_);
            top = e.value > top || e.value != e.value ? e.value : top;
            copy[i] = -INFINITY;
        });
        x_ = copy;
        const double others = largest();
        if (choice_.temperature != 0) each([&](int64_t i, Edit& e) { copy[i] = (float)e.value; });
        top = others > top || others != others ? others : top;
        for (const Edit& e : edits_.all)
            if (e.value != e.value) return NAN;
        return top;
    }

    double logit(int32_t id, float rounded) const {
        const Edit* e = edits_.of(id);
        return e ? e->value : rounded;
    }

    // Calls body(first element, logits) for every vector.
    template <class F> INLINE void vectors(const F& body) const {
        int64_t i = 0;
        for (; i + W <= n_; i += W) body(i, load(x_ + i));
        if (i < n_) body(i, load_some(x_ + i, (int)(n_ - i), -INFINITY));
    }

    float largest() const {
        vf most = splat(-INFINITY);
        vi wrong = {};
        vectors([&](int64_t, vf a) {
            wrong |= a != a;
            most = maximum(a, most);
        });
        if (any(wrong)) return NAN;
        float top = -INFINITY;
        for (int i = 0; i < W; ++i) top = std::max(top, most[i]);
        return top;
    }

    // Temperature 0: edited logits are compared in float64; they are -infinity in x_.
    int64_t best() const {
        if (top_ == -INFINITY) return NOTHING;
        int32_t where = INT32_MAX;
        for (const Edit& e : edits_.all)
            if (e.value == top_) where = std::min(where, e.id);
        vectors([&](int64_t i, vf a) {
            for (uint32_t left = lanes(a == splat((float)top_)); left && (float)top_ == top_; left &= left - 1)
                where = std::min(where, id(i + __builtin_ctz(left)));
        });
        return where;
    }

    // --- filters -------------------------------------------------------------------------------------------------------

    void filter() {
        if (choice_.top_k && choice_.top_k < n_) {
            const int64_t k = choice_.top_k;
            std::vector<Token>& tokens = between(chunk_bound(k), INFINITY);
            std::nth_element(tokens.begin(), tokens.begin() + (k - 1), tokens.end(), before);
            sure_ = maybe_ = tokens[k - 1];
            if (choice_.top_p < 1) {
                tokens.resize(k);
                std::sort(tokens.begin(), tokens.end(), before);
                double total = 0;
                for (const Token& t : tokens) total += mass((float)t.logit);
                nucleus(tokens, 0, total);
            }
        } else if (choice_.top_p < 1) {
            bisect();
        }
        if (choice_.min_p > 0) {
            const double lowest = std::log(choice_.min_p), bound = 1e-12 + rounding_;
            sure_logit_ = std::min(top_ + (lowest + bound) * choice_.temperature, top_);
            maybe_logit_ = top_ + (lowest - bound) * choice_.temperature;
        }
        // The reference may take logits that are closer than its rounding for equal, or in the wrong order.
        const double slack = slack_ = rounding_ * choice_.temperature, at = sure_.logit;
        const float next = (float)at;
        const auto near = [&](double other) { return other != at && std::abs(other - at) <= slack; };
        ties_ = std::abs(at) == INFINITY ||
                !(near(next) || near(std::nextafterf(next, INFINITY)) || near(std::nextafterf(next, -INFINITY)));
        for (const Edit& e : edits_.all) ties_ &= !near(e.value);
    }
    double slack_ = 0;

    float mass(float logit) const { return exponential((logit - (float)top_) * scale_); }

    // A logit with at least k logits from it on: the k-th largest of the chunks' largest ones.
    float chunk_bound(int64_t k) const {
        const int64_t count = (n_ + W - 1) / W, step = std::max<int64_t>(1, count / (8 * k));
        std::vector<float>& most = floats_;
        most.clear();
        for (int64_t v = 0; v < count; v += step) {
            vf best = splat(-INFINITY);
            for (int64_t i = v * W; i < std::min(v + step, count) * W; i += W)
                best = maximum(i + W <= n_ ? load(x_ + i) : load_some(x_ + i, (int)(n_ - i), -INFINITY), best);
            float top = -INFINITY;
            for (int i = 0; i < W; ++i) top = std::max(top, best[i]);
            most.push_back(top);
        }
        if ((int64_t)most.size() < k) return -INFINITY;
        std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
        return most[k - 1];
    }

    // The tokens with rounded logits from `low` to `high`.
    std::vector<Token>& between(float low, float high) const {
        std::vector<Token>& found = tokens_;
        found.clear();
        vectors([&](int64_t i, vf a) {
            for (uint32_t left = lanes((a >= low) & (a <= high)); left; left &= left - 1) {
                const int64_t at = i + __builtin_ctz(left);
                if (at < n_) found.push_back({logit(id(at), x_[at]), id(at)});
            }
        });
        return found;
    }
    static thread_local std::vector<Token> tokens_;
    static thread_local std::vector<float> floats_;

    // Finds the boundary of top-p around which the mass is too close to decide, or few tokens are left.
    void bisect() {
        float* masses = scratch<8>(n_ + W);
        typedef double vd __attribute__((vector_size(8 * W)));
        vectors([&](int64_t i, vf a) { store(exponential((a - (float)top_) * scale_), masses + i); });
        // mass and number of the tokens with a logit above `bound`
        const auto above = [&](float bound, int64_t& count) {
            vd sum = {};
            vf part = {};
            vi counts = {};
            int parts = 0;
            vectors([&](int64_t i, vf a) {
                const vi over = a > bound;
                counts -= over;
                part += select(over, load(masses + i), vf{});
                if (++parts % 8 == 0) sum += __builtin_convertvector(part, vd), part = vf{};
            });
            sum += __builtin_convertvector(part, vd);
            double total = 0;
            count = 0;
            for (int i = 0; i < W; ++i) total += sum[i], count += counts[i];
            return total;
        };
        int64_t all, count;
        const double total = above(-INFINITY, all);
        const double bound = (MASS_ERROR + 2 * error_) * total, wanted = choice_.top_p * total;
        float low = -INFINITY, high = (float)top_;
        double sure = 0, from = -32, to = 0;
        int64_t over = 0, under = all;  // tokens above `high`, above `low`
        for (int i = 0; i < 24 && under - over > FEW; ++i) {
            const double middle = (from + to) / 2;
            const float at = (float)(top_ + middle * choice_.temperature);
            if (!(at < high && at > low)) break;
            const double share = above(at, count);
            if (share < wanted - bound) {
                high = at, sure = share, over = count, to = middle;
            } else if (share >= wanted + bound) {
                low = at, under = count, from = middle;
            } else {
                break;
            }
        }
        std::vector<Token>& tokens = between(std::nextafterf(low, INFINITY), high);
        std::sort(tokens.begin(), tokens.end(), before);
        if (over) {  // what rounds to more than `high`
            const double limit = ((double)high + std::nextafterf(high, INFINITY)) / 2;
            sure_ = {limit, -1};
            maybe_ = {limit, INT32_MAX};
        } else {
            sure_ = maybe_ = {INFINITY, -1};
        }
        nucleus(tokens, sure, total);
    }

    // Walks along tokens in their order; `mass_before` is the mass of those before them. The first of all is kept.
    void nucleus(const std::vector<Token>& tokens, double mass_before, double total) {
        const double bound = (MASS_ERROR + 2 * error_) * total, wanted = choice_.top_p * total;
        for (const Token& token : tokens) {
            if (mass_before >= wanted + bound) break;
            maybe_ = token;
            if (mass_before < wanted - bound || mass_before == 0) sure_ = token;
            mass_before += mass((float)token.logit);
        }
    }

    // 2: kept, 1: perhaps, 0: not.
    int kept(const Token& token) const {
        const double logit = token.logit;
        if ((before(maybe_, token) && !(!ties_ && logit >= maybe_.logit - slack_)) || logit < maybe_logit_) return 0;
        return (logit > sure_.logit + slack_ || (ties_ && !before(sure_, token))) && logit >= sure_logit_ ? 2 : 1;
    }

    // --- the draw ------------------------------------------------------------------------------------------------------

    struct Contender {
        float score, logit;
        int32_t id;
        uint32_t word;
    };

    int64_t drawn() const {
        const Key key{(uint32_t)choice_.seed, (uint32_t)((uint64_t)choice_.seed >> 32)};
        const float margin = (float)(4 * NOISE_ERROR + 0x1p-21 * HOPELESS + 2 * error_);
        std::vector<Contender>& contenders = contenders_;
        contenders.clear();
        float floor = -INFINITY;  // no token with less can win
        bool lost = false;        // a contender was dropped for want of room
        const double lowest = std::max(maybe_.logit - slack_, maybe_logit_);
        const float low = std::nextafterf(std::max((float)lowest, -3e38f), -INFINITY), top = (float)top_;
        const auto offer = [&](vf logits, vu words, vi ids, uint32_t candidates) {
            const vf difference = (logits - top) * scale_;
            candidates &= lanes(difference + gumbel_bound(words) >= floor);
            if (!candidates) return;
            const vf score = difference + gumbel(words);
            for (uint32_t left = candidates & lanes(score >= floor); left; left &= left - 1) {
                const int i = __builtin_ctz(left);
                if (score[i] < floor || !kept({logit(ids[i], logits[i]), ids[i]})) continue;
                floor = std::max(floor, score[i] - margin);
                if (contenders.size() == MOST_CONTENDERS) {
                    contenders.erase(std::remove_if(contenders.begin(), contenders.end(),
                                                    [&](const Contender& c) { return c.score < floor; }),
                                     contenders.end());
                    if (contenders.size() == MOST_CONTENDERS) {
                        lost = true;
                        continue;
                    }
                }
                contenders.push_back({score[i], logits[i], ids[i], words[i]});
            }
        };
        // the best logit first: its score rules most tokens out
        const auto worth = [&](vf logits) {
            return lanes((logits >= low) & ((logits - top) * scale_ + MOST_NOISE >= floor));
        };
        vi lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        for (int64_t i = 0; i < n_; i += W) {  // any token with the best logit
            const vf a = i + W <= n_ ? load(x_ + i) : load_some(x_ + i, (int)(n_ - i), -INFINITY);
            const uint32_t best = lanes(a == top);
            if (!best) continue;
            const vi ids = ids_ ? load_some(ids_ + i, (int)std::min<int64_t>(W, n_ - i), INT32_MAX) : (int32_t)i + lane;
            const vu words = philox(ids, position_, 0, key);
            const int at = __builtin_ctz(best);
            if (kept({logit(ids[at], top), ids[at]})) floor = gumbel(words)[at] - margin;
            break;
        }
        if (ids_) {
            vectors([&](int64_t i, vf a) {
                const uint32_t candidates = worth(a);
                if (!candidates) return;
                const vi ids = load_some(ids_ + i, (int)std::min<int64_t>(W, n_ - i), INT32_MAX);
                offer(a, philox(ids, position_, 0, key), ids, candidates);
            });
        } else {
            for (int64_t first = 0; first < n_; first += LANES) {
                uint32_t candidates[4], some = 0;
                vf logits[4];
                for (int j = 0; j < 4; ++j) {
                    const int64_t at = first + j * W;
                    logits[j] = at + W <= n_ ? load(x_ + at)
                                : at < n_    ? load_some(x_ + at, (int)(n_ - at), -INFINITY)
                                             : splat(-INFINITY);
                    some |= candidates[j] = worth(logits[j]);
                }
                if (!some) continue;
                vu words[4];
                philox((uint32_t)(first / 4), position_, 0, key, words);
                for (int j = 0; j < 4; ++j)
                    if (candidates[j]) offer(logits[j], words[j], (int32_t)(first + j * W) + lane, candidates[j]);
            }
        }
        double best = -INFINITY, second = -INFINITY;
        Token winner{-INFINITY, -1};
        for (const Contender& c : contenders) {
            if (c.score < floor) continue;
            const Token token{logit(c.id, c.logit), c.id};
            const double score = (token.logit - top_) / choice_.temperature + gumbel(c.word);
            second = std::max(second, std::min(score, best));
            if (score > best) best = score, winner = token;
        }
        if (winner.id < 0) return NOTHING;
        const bool certain = !lost && best - second > 1e-10 + 8 * rounding_ && kept(winner) == 2;
        return certain ? winner.id : ~(int64_t)winner.id;
    }
    static thread_local std::vector<Contender> contenders_;
};

thread_local Edits Row::edits_;
thread_local std::vector<Token> Row::tokens_;
thread_local std::vector<float> Row::floats_;
thread_local std::vector<Row::Contender> Row::contenders_;

// --- log-probabilities -------------------------------------------------------------------------------------------------

// e^x for x <= 0 in float64, by operations that every machine and numpy round alike; 0 below -64. The reference's
// _exponential has the same steps.
typedef double v8d __attribute__((vector_size(64)));
typedef int64_t v8l __attribute__((vector_size(64)));

INLINE v8d exponential(v8d x) {
    const v8d shifted = x * 1.4426950408889634 + 0x1.8p52;
    const v8d n = shifted - 0x1.8p52;
    v8d r = x - n * 0x1.62e42feep-1;
    r = r - n * 0x1.a39ef35793c76p-33;
    v8d p = r * (1.0 / 6227020800) + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const v8l power = ((v8l)shifted + 1023) << 52;  // the integer is in the low bits of `shifted`
    return x < -64.0 ? v8d{} : p * (v8d)power;
}

// The sum of e^(logit - top) in units of 2^-80, as two integers: high * 2^40 + low. Order does not matter.
void exponential_sum(const float* logits, int64_t n, float top, int64_t* sums) {
    v8l high = {}, low = {};
    typedef float v8f __attribute__((vector_size(32)));
    for (int64_t i = 0; i < n; i += 8) {
        v8f some = v8f{} - INFINITY;
        std::memcpy(&some, logits + i, std::min<int64_t>(8, n - i) * sizeof(float));
        const v8d x = __builtin_convertvector(some, v8d) - (double)top;
        const v8d scaled = exponential(x < -1000.0 ? v8d{} - 1000.0 : x) * 0x1p40;
        const v8l whole = __builtin_convertvector(scaled, v8l);
        high += whole;
        low += __builtin_convertvector((scaled - __builtin_convertvector(whole, v8d)) * 0x1p40, v8l);
    }
    sums[0] = sums[1] = 0;
    for (int j = 0; j < 8; ++j) sums[0] += high[j], sums[1] += low[j];
}

}  // namespace specdec

// Chooses the token of every row `[rows, n]`, rows at once: the token, ~token for a guess, or one of the two values at
// the top of this file. `ids`: of a pruned row, else null.
EXPORT void choose_rows(const float* logits, int64_t rows, int64_t n, const int32_t* ids, int64_t vocabulary,
                        const void* choice, int64_t* tokens, int64_t threads) {
    const auto& c = *(const specdec::Choice*)choice;
    const bool alone = rows * n * 4 < specdec::SERIAL_WORK / 8;
    specdec::for_blocks(alone ? 1 : (int)threads, rows, [&](int64_t row) {
        tokens[row] = specdec::Row(logits + row * n, ids, n, vocabulary, c, row).token();
    });
}

EXPORT void exponential_sum(const float* logits, int64_t n, float top, int64_t* sums) {
    specdec::exponential_sum(logits, n, top, sums);
}
