//! "Did you mean".

/// The candidate that is spelled most like `word`, if any is close.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let limit = (word.chars().count() / 3).max(2);
    let scored = candidates.into_iter().map(|candidate| {
        (strsim::damerau_levenshtein(&word, &candidate.to_lowercase()), candidate)
    });
    scored.filter(|&(distance, _)| distance <= limit).min().map(|(_, candidate)| candidate)
}

/// The end of a sentence that names the nearest candidate.
pub(crate) fn hint(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |nearest| format!(" (did you mean '{nearest}'?)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let keys = ["tp", "pp", "block", "layout"];
        assert_eq!(nearest("blok", keys), Some("block"));
        assert_eq!(nearest("tensor-parallel", keys), None);
        assert_eq!(nearest("LAYOUT", keys), Some("layout"));
    }
}
