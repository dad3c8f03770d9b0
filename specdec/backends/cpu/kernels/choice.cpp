// Chooses the tokens of rows of logits, with every setting of sampling: bias, penalties, bans, temperature, top-k,
// top-p, min-p and the noise of the position. The steps are those of specdec.sampling, in float32.
//
// Bits contract: the token of a row is a function of its logits, its history, the settings and its position alone, not
// of the other rows or the number of threads. A pass of one row and a verified row choose alike.
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

constexpr int64_t NOTHING = -1;     // no token is allowed
constexpr int64_t NOT_FINITE = -2;  // a NaN or +infinity among the logits, or no finite one

constexpr float MOST_NOISE = 22.9f;  // of a 32-bit word; the least is -3.2
constexpr int64_t FEW = 256;         // tokens around the boundary of top-p that are sorted

struct Token {
    float logit;
    int32_t id;
};

INLINE bool before(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// --- edits: logits that differ from the row's --------------------------------------------------------------------------

struct Edit {
    int32_t id;
    int32_t generated = 0;
    double bias = 0;
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

// The operations of specdec.sampling.processed in its order, rounded once.
float edited(const Edit& e, float raw, const Choice& c) {
    double value = raw;
    if (e.has_bias) value += e.bias;
    if (e.seen && c.repetition != 1) value = value > 0 ? value / c.repetition : value * c.repetition;
    if (e.generated && (c.presence != 0 || c.frequency != 0)) value -= c.presence + c.frequency * e.generated;
    return e.banned ? -INFINITY : (float)value;
}

// --- one row -----------------------------------------------------------------------------------------------------------

class Row {
  public:
    Row(const float* logits, const int32_t* ids, int64_t n, int64_t vocabulary, const Choice& choice, int64_t row)
        : x_(logits), ids_(ids), n_(n), choice_(choice), position_((uint32_t)(choice.position + row)) {
        edits_.collect(choice, row, vocabulary);
        if (!edits_.all.empty()) edit();
    }
    ~Row() { edits_.clear(); }

    int64_t token() {
        top_ = largest();
        if (top_ != top_ || top_ == INFINITY) return NOT_FINITE;
        if (top_ == -INFINITY) return edits_.all.empty() ? NOT_FINITE : NOTHING;
        if (choice_.temperature == 0) return best();
        scale_ = (float)(1 / choice_.temperature);
        filter();
        return drawn();
    }

  private:
    static thread_local Edits edits_;
    const float* x_;
    const int32_t* ids_;  // of a pruned row
    const int64_t n_;
    const Choice& choice_;
    const uint32_t position_;
    float top_ = 0;
    float scale_ = 0;
    Token last_{-INFINITY, INT32_MAX};  // the last token that filters keep

    int32_t id(int64_t i) const { return ids_ ? ids_[i] : (int32_t)i; }

    // Replaces the edited logits in a copy of the row.
    void edit() {
        float* copy = scratch<7>(n_);
        std::memcpy(copy, x_, n_ * sizeof(float));
        if (ids_) {
            for (int64_t i = 0; i < n_; ++i)
                if (const Edit* e = edits_.of(ids_[i])) copy[i] = edited(*e, copy[i], choice_);
        } else {
            for (const Edit& e : edits_.all) copy[e.id] = edited(e, copy[e.id], choice_);
        }
        x_ = copy;
    }

    // Calls body(first element, logits) for every vector.
    template <class F> INLINE void vectors(const F& body) const {
        for (int64_t i = 0; i < n_; i += W) body(i, logits_at(x_, i, n_));
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

    // The lowest id among the best logits.
    int64_t best() const {
        int32_t where = INT32_MAX;
        vectors([&](int64_t i, vf a) {
            for (uint32_t left = lanes(a == splat(top_)); left; left &= left - 1)
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
            last_ = tokens[k - 1];
            if (choice_.top_p < 1) {
                tokens.resize(k);
                std::sort(tokens.begin(), tokens.end(), before);
                double total = 0;
                for (const Token& t : tokens) total += mass(t.logit);
                nucleus(tokens, 0, total);
            }
        } else if (choice_.top_p < 1) {
            bisect();
        }
        if (choice_.min_p > 0) {
            const float lowest = (float)(top_ + std::log(choice_.min_p) * choice_.temperature);
            if (lowest > last_.logit) last_ = {lowest, INT32_MAX};
        }
    }

    float mass(float logit) const { return exponential((logit - top_) * scale_); }

    // A logit with at least k logits from it on: the k-th largest of the chunks' largest ones.
    float chunk_bound(int64_t k) const {
        const int64_t count = (n_ + W - 1) / W, step = std::max<int64_t>(1, count / (8 * k));
        std::vector<float>& most = floats_;
        most.clear();
        for (int64_t v = 0; v < count; v += step) {
            vf best = splat(-INFINITY);
            for (int64_t i = v * W; i < std::min(v + step, count) * W; i += W)
                best = maximum(logits_at(x_, i, n_), best);
            float top = -INFINITY;
            for (int i = 0; i < W; ++i) top = std::max(top, best[i]);
            most.push_back(top);
        }
        if ((int64_t)most.size() < k) return -INFINITY;
        std::nth_element(most.begin(), most.begin() + (k - 1), most.end(), std::greater<float>());
        return most[k - 1];
    }

    // The tokens with logits from `low` to `high`.
    std::vector<Token>& between(float low, float high) const {
        std::vector<Token>& tokens = tokens_;
        tokens.clear();
        vectors([&](int64_t i, vf a) {
            for (uint32_t left = lanes((a >= low) & (a <= high)); left; left &= left - 1) {
                const int64_t at = i + __builtin_ctz(left);
                if (at < n_) tokens.push_back({x_[at], id(at)});
            }
        });
        return tokens;
    }
    static thread_local std::vector<Token> tokens_;
    static thread_local std::vector<float> floats_;

    // Finds the boundary of top-p.
    void bisect() {
        float* masses = scratch<8>(n_ + W);
        typedef double vd __attribute__((vector_size(8 * W)));
        vectors([&](int64_t i, vf a) { store(exponential((a - top_) * scale_), masses + i); });
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
        float low = -INFINITY, high = top_;  // the boundary is above `low`, and at most `high`
        double mass_above = 0, from = -32, to = 0;
        int64_t over = 0, under = all;  // tokens above `high`, above `low`
        for (int i = 0; i < 24 && under - over > FEW; ++i) {
            const double middle = (from + to) / 2;
            const float at = (float)(top_ + middle * choice_.temperature);
            if (!(at < high && at > low)) break;
            const double share = above(at, count);
            if (share < choice_.top_p * total) {
                high = at, mass_above = share, over = count, to = middle;
            } else {
                low = at, under = count, from = middle;
            }
        }
        std::vector<Token>& tokens = between(std::nextafterf(low, INFINITY), high);
        std::sort(tokens.begin(), tokens.end(), before);
        nucleus(tokens, mass_above, total);
    }

    // Walks along tokens in their order up to the one that reaches top-p; `mass_before` is the mass of those before them.
    void nucleus(const std::vector<Token>& tokens, double mass_before, double total) {
        for (const Token& token : tokens) {
            last_ = token;
            mass_before += mass(token.logit);
            if (mass_before >= choice_.top_p * total) break;
        }
    }

    // --- the draw ------------------------------------------------------------------------------------------------------

    int64_t drawn() const {
        const Key key{(uint32_t)choice_.seed, (uint32_t)((uint64_t)choice_.seed >> 32)};
        float most = -INFINITY;  // the best score, and its token
        int32_t winner = INT32_MAX;
        const auto offer = [&](vf logits, vu words, vi ids, uint32_t candidates) {
            const vf difference = (logits - top_) * scale_;
            candidates &= lanes(difference + gumbel_bound(words) >= most);
            if (!candidates) return;
            const vf score = difference + gumbel(words);
            for (uint32_t left = candidates & lanes(score >= most); left; left &= left - 1) {
                const int i = __builtin_ctz(left);
                if (before(last_, {logits[i], ids[i]})) continue;
                if (score[i] > most || (score[i] == most && ids[i] < winner)) most = score[i], winner = ids[i];
            }
        };
        const auto worth = [&](vf logits) {
            return lanes((logits >= last_.logit) & ((logits - top_) * scale_ + MOST_NOISE >= most));
        };
        vi lane;
        for (int i = 0; i < W; ++i) lane[i] = i;
        const auto ids_from = [&](int64_t i) {
            return ids_ ? load_some(ids_ + i, (int)std::min<int64_t>(W, n_ - i), INT32_MAX) : (int32_t)i + lane;
        };
        for (int64_t i = 0; i < n_ && winner == INT32_MAX; i += W) {  // the best logit first: it rules most tokens out
            const vf a = logits_at(x_, i, n_);
            const vi ids = ids_from(i);
            if (const uint32_t best = lanes(a == top_)) offer(a, philox(ids, position_, 0, key), ids, best);
        }
        if (ids_) {
            vectors([&](int64_t i, vf a) {
                const uint32_t candidates = worth(a);
                if (!candidates) return;
                const vi ids = ids_from(i);
                offer(a, philox(ids, position_, 0, key), ids, candidates);
            });
            return winner;
        }
        for (int64_t first = 0; first < n_; first += LANES) {
            uint32_t candidates[4], some = 0;
            vf logits[4];
            for (int j = 0; j < 4; ++j) {
                logits[j] = logits_at(x_, first + j * W, n_);
                some |= candidates[j] = worth(logits[j]);
            }
            if (!some) continue;
            vu words[4];
            philox((uint32_t)(first / 4), position_, 0, key, words);
            for (int j = 0; j < 4; ++j)
                if (candidates[j]) offer(logits[j], words[j], (int32_t)(first + j * W) + lane, candidates[j]);
        }
        return winner;
    }
};

thread_local Edits Row::edits_;
thread_local std::vector<Token> Row::tokens_;
thread_local std::vector<float> Row::floats_;

}  // namespace specdec

// Chooses the token of every row `[rows, n]`, rows at once: the token, or NOTHING or NOT_FINITE. `ids`: of a pruned row,
// else null.
EXPORT void choose_rows(const float* logits, int64_t rows, int64_t n, const int32_t* ids, int64_t vocabulary,
                        const void* choice, int64_t* tokens, int64_t threads) {
    const auto& c = *(const specdec::Choice*)choice;
    const bool alone = rows * n * 4 < specdec::SERIAL_WORK / 8;
    specdec::for_blocks(alone ? 1 : (int)threads, rows, [&](int64_t row) {
        tokens[row] = specdec::Row(logits + row * n, ids, n, vocabulary, c, row).token();
    });
}
