//! Sizes that are computed from others: `hidden_size / num_attention_heads`, `head_dim or size * 2`.
//!
//! Names, whole numbers, `+ - * /`, brackets, and `or`, which takes the first side whose names are all
//! there. A division must come out even.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A parsed expression.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Expression {
    Number(u64),
    Name(String),
    Or(Box<Self>, Box<Self>),
    Step(Operator, Box<Self>, Box<Self>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Plus,
    Minus,
    Times,
    Over,
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoValue<E> {
    /// A name that is not there.
    Missing(String),
    /// The numbers do not allow it: which part of the expression, its value, and what it should be.
    Unfit { part: String, value: u64, expected: String },
    /// Looking a name up failed.
    Lookup(E),
}

/// Brackets within brackets, and letters, at most: values are computed by recursion.
const MAX_DEPTH: usize = 32;
const MAX_LENGTH: usize = 1000;
/// No value may be larger: what is computed from it later stays a number of bytes.
pub(super) const MAX_VALUE: u64 = 1 << 44;

impl Expression {
    /// The value, where `look` gives those of names.
    pub(crate) fn value<E>(
        &self,
        look: &impl Fn(&str) -> Result<Option<u64>, E>,
    ) -> Result<u64, NoValue<E>> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Name(name) => {
                let found = look(name).map_err(NoValue::Lookup)?;
                found.ok_or_else(|| NoValue::Missing(name.clone()))
            }
            Self::Or(first, second) => match first.value(look) {
                Err(NoValue::Missing(_)) => second.value(look),
                other => other,
            },
            Self::Step(operator, left, right) => {
                let (one, other) = (left.value(look)?, right.value(look)?);
                let unfit = |part: &Self, value, expected| {
                    Err(NoValue::Unfit { part: part.to_string(), value, expected })
                };
                let result = match operator {
                    Operator::Plus => one.checked_add(other),
                    Operator::Times => one.checked_mul(other),
                    Operator::Minus => match one.checked_sub(other) {
                        None => return unfit(left, one, format!("at least {other}")),
                        some => some,
                    },
                    Operator::Over => match one.checked_rem(other) {
                        Some(0) => Some(one / other),
                        _ => {
                            let expected = match **right {
                                Self::Number(_) => format!("a multiple of {other}"),
                                _ => format!("a multiple of '{right}', which is {other}"),
                            };
                            return unfit(left, one, expected);
                        }
                    },
                };
                match result {
                    Some(value) if value <= MAX_VALUE => Ok(value),
                    _ => unfit(left, one, format!("small enough that {self} is a size")),
                }
            }
        }
    }

    /// Whether [`Self::solved_for`] can tell the value of a name in it.
    pub(crate) fn can_be_solved_for(&self, name: &str) -> bool {
        self.names().into_iter().filter(|other| *other == name).count() == 1 && !self.has_choice()
    }

    /// The value of a name for which the whole has the value `result`, if there is one. `value` gives
    /// those of parts without the name.
    pub(crate) fn solved_for(
        &self,
        name: &str,
        result: u64,
        value: &impl Fn(&Self) -> Option<u64>,
    ) -> Option<u64> {
        let divided = |one: u64, other: u64| match one.checked_rem(other) {
            Some(0) => Some(one / other),
            _ => None,
        };
        match self {
            Self::Name(own) if own == name => Some(result),
            Self::Step(operator, left, right) if left.names().contains(&name) => {
                let other = value(right)?;
                let result = match operator {
                    Operator::Plus => result.checked_sub(other),
                    Operator::Minus => result.checked_add(other),
                    Operator::Times => divided(result, other),
                    Operator::Over => result.checked_mul(other),
                };
                left.solved_for(name, result?, value)
            }
            Self::Step(operator, left, right) => {
                let other = value(left)?;
                let result = match operator {
                    Operator::Plus => result.checked_sub(other),
                    Operator::Minus => other.checked_sub(result),
                    Operator::Times => divided(result, other),
                    Operator::Over => divided(other, result),
                };
                right.solved_for(name, result?, value)
            }
            Self::Number(_) | Self::Name(_) | Self::Or(..) => None,
        }
    }

    fn has_choice(&self) -> bool {
        match self {
            Self::Number(_) | Self::Name(_) => false,
            Self::Or(..) => true,
            Self::Step(_, one, other) => one.has_choice() || other.has_choice(),
        }
    }

    /// Every name in it.
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Self::Number(_) => vec![],
            Self::Name(name) => vec![name],
            Self::Or(one, other) | Self::Step(_, one, other) => {
                [one.names(), other.names()].concat()
            }
        }
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |inner: &Self| match inner {
            Self::Number(_) | Self::Name(_) => inner.to_string(),
            _ => format!("({inner})"),
        };
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => f.write_str(name),
            Self::Or(one, other) => write!(f, "{} or {}", part(one), part(other)),
            Self::Step(operator, one, other) => {
                let sign = match operator {
                    Operator::Plus => '+',
                    Operator::Minus => '-',
                    Operator::Times => '*',
                    Operator::Over => '/',
                };
                write!(f, "{} {sign} {}", part(one), part(other))
            }
        }
    }
}

impl From<Expression> for String {
    fn from(expression: Expression) -> Self {
        expression.to_string()
    }
}

impl TryFrom<String> for Expression {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("an expression of more than {MAX_LENGTH} letters"));
        }
        let words = words(&text)?;
        let mut parser = Parser { words: &words, depth: 0 };
        let made = parser.alternatives().map_err(|problem| format!("'{text}': {problem}"))?;
        match parser.words.first() {
            None => Ok(made),
            Some(word) => Err(format!("'{text}': '{word}' was not expected there")),
        }
    }
}

/// Names, numbers and signs.
fn words(text: &str) -> Result<Vec<String>, String> {
    let mut words: Vec<String> = vec![];
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '.';
    let mut in_word = false;
    for letter in text.chars() {
        if is_word(letter) {
            if !in_word {
                words.push(String::new());
            }
            words.last_mut().expect("just pushed").push(letter);
        } else if "+-*/()".contains(letter) {
            words.push(letter.to_string());
        } else if !letter.is_whitespace() {
            return Err(format!(
                "'{text}': '{letter}' means nothing here; use names, numbers, + - * / ( ) and 'or'"
            ));
        }
        in_word = is_word(letter);
    }
    Ok(words)
}

struct Parser<'a> {
    words: &'a [String],
    depth: usize,
}

impl Parser<'_> {
    fn take(&mut self, wanted: &[&str]) -> Option<&str> {
        let (first, rest) = self.words.split_first()?;
        if !wanted.contains(&first.as_str()) {
            return None;
        }
        self.words = rest;
        Some(first)
    }

    fn alternatives(&mut self) -> Result<Expression, String> {
        let mut options = vec![self.sum()?];
        while self.take(&["or"]).is_some() {
            options.push(self.sum()?);
        }
        let last = options.pop().expect("there is one");
        let join = |later, earlier| Expression::Or(Box::new(earlier), Box::new(later));
        Ok(options.into_iter().rev().fold(last, join))
    }

    fn sum(&mut self) -> Result<Expression, String> {
        let mut made = self.product()?;
        while let Some(sign) = self.take(&["+", "-"]) {
            let operator = if sign == "+" { Operator::Plus } else { Operator::Minus };
            made = Expression::Step(operator, Box::new(made), Box::new(self.product()?));
        }
        Ok(made)
    }

    fn product(&mut self) -> Result<Expression, String> {
        let mut made = self.part()?;
        while let Some(sign) = self.take(&["*", "/"]) {
            let operator = if sign == "*" { Operator::Times } else { Operator::Over };
            made = Expression::Step(operator, Box::new(made), Box::new(self.part()?));
        }
        Ok(made)
    }

    fn part(&mut self) -> Result<Expression, String> {
        if self.take(&["("]).is_some() {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(format!("more than {MAX_DEPTH} brackets within each other"));
            }
            let made = self.alternatives()?;
            self.take(&[")"]).ok_or("a bracket is not closed")?;
            self.depth -= 1;
            return Ok(made);
        }
        let Some((word, rest)) = self.words.split_first() else {
            return Err("it ends where a name or a number should be".to_owned());
        };
        if word == "or" || "+-*/()".contains(word.as_str()) {
            return Err(format!("'{word}' stands where a name or a number should be"));
        }
        self.words = rest;
        if !word.starts_with(|letter: char| letter.is_ascii_digit()) {
            return Ok(Expression::Name(word.clone()));
        }
        let number = word.parse().ok().filter(|number| *number <= MAX_VALUE);
        number.map(Expression::Number).ok_or_else(|| format!("'{word}' is not a size"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<u64, String> {
        let look = |name: &str| match name {
            "a" => Ok(Some(12)),
            "b" => Ok(Some(4)),
            "zero" => Ok(Some(0)),
            "bad" => Err("bad".to_owned()),
            _ => Ok(None),
        };
        let expression = Expression::try_from(text.to_owned())?;
        let again = Expression::try_from(expression.to_string()).unwrap();
        assert_eq!(again.value(&look), expression.value(&look), "{text} as {expression}");
        expression.value(&look).map_err(|problem| format!("{problem:?}"))
    }

    #[test]
    fn what_can_be_computed_is() {
        for (text, expected) in [
            ("7", 7),
            ("a - b - 1", 7),
            ("a - (b - 1)", 9),
            ("a / b * 2 + 1", 7),
            ("missing or missing * 2 or a", 12),
            ("a or bad", 12),
            ("2 * (missing or b)", 8),
            ("zero * a", 0),
        ] {
            assert_eq!(value(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_name_is_found_from_the_result() {
        let known = |part: &Expression| match part.to_string().as_str() {
            "a" => Some(12),
            number => number.parse().ok(),
        };
        for (text, result, expected) in [
            ("x", 5, Some(5)),
            ("a * x", 36, Some(3)),
            ("a * x", 37, None),
            ("x * 2 + a", 20, Some(4)),
            ("x * 2 + a", 10, None),
            ("a - x", 5, Some(7)),
            ("a - x", 13, None),
            ("x - a", 5, Some(17)),
            ("x / 4", 3, Some(12)),
            ("a / x", 3, Some(4)),
            ("a / x", 5, None),
            ("a / x", 0, None),
        ] {
            let expression = Expression::try_from(text.to_owned()).unwrap();
            assert!(expression.can_be_solved_for("x"), "{text}");
            assert_eq!(expression.solved_for("x", result, &known), expected, "{text} = {result}");
        }
        for text in ["a", "x * x", "x or a"] {
            let expression = Expression::try_from(text.to_owned()).unwrap();
            assert!(!expression.can_be_solved_for("x"), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_computed_says_why() {
        for (text, part) in [
            ("missing", "Missing(\"missing\")"),
            ("missing or other", "Missing(\"other\")"),
            ("bad or a", "Lookup"),
            ("b / a", "a multiple of 'a', which is 12"),
            ("a / zero", "a multiple of 'zero', which is 0"),
            ("b - a", "at least 12"),
            ("a * 17592186044416", "small enough"),
            ("", "it ends where"),
            ("a +", "it ends where"),
            ("a b", "'b' was not expected"),
            ("(a", "not closed"),
            ("a)", "')' was not expected"),
            ("a or", "it ends where"),
            ("or a", "'or' stands where"),
            ("a % b", "'%' means nothing here"),
            ("12x", "'12x' is not a size"),
            ("99999999999999999999", "is not a size"),
        ] {
            let problem = value(text).unwrap_err();
            assert!(problem.contains(part), "{text}: {problem}");
        }
        let deep = format!("{}a{}", "(".repeat(40), ")".repeat(40));
        assert!(value(&deep).unwrap_err().contains("more than 32 brackets"));
        let long = vec!["a"; 100_000].join(" - ");
        assert!(value(&long).unwrap_err().contains("more than 1000 letters"));
    }
}
